"""Whether a model treats examples independently and keeps their places, checked on an example of every chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from saltflat.engine.data import Batch
from saltflat.engine.example_groups import can_join, join_batches
from saltflat.engine.network import Network
from saltflat.engine.per_example import split_examples
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import make_coupled_error
from saltflat.engine.strategy import Probe, compute_working_memory
from saltflat.engine.strategy_trial import TOGETHER
from saltflat.errors import CoupledExamplesError

ALONE, JOINED = 4, 16  # examples of the first chunks that are run alone, and of later ones that are run at once
ENTRIES = 64  # of a layer's input that are compared
AMPLIFIED = 10.0  # how much larger rounding may be inside of a model than at its outputs


class MovedExamplesError(CoupledExamplesError):
    """Raised if a layer receives the examples of a chunk in other places than the batch has them."""


class LayerInputs:
    """Entries of what layers receive for some examples of a batch.

    Args:
        examples: of the batch.
        numbers: the places of the examples in the batch.

    Attributes:
        samples: by call of a layer, the layer, the shape of an example's input, and entries and largest size of it,
            ``(numbers, entries + 1)``; None where the input has no axis for the examples.
    """

    def __init__(self, examples: int, numbers: Sequence[int]) -> None:
        self.examples, self.numbers = examples, list(numbers)
        self.samples: list[tuple[nn.Module, torch.Size, Tensor] | None] = []

    def add(self, module: nn.Module, x: Tensor) -> None:
        """Add the input of a call."""
        if is_functorch_wrapped_tensor(x) or not x.dim() or not len(x) or len(x) % self.examples:
            self.samples.append(None)
            return
        rows = split_examples(x.detach(), self.examples, 0)
        flat = rows[self.numbers].flatten(1)
        entries = flat[:, :: max(1, -(-flat.shape[1] // ENTRIES))]
        sample = torch.cat([entries, flat.abs().amax(1, keepdim=True)], 1)
        self.samples.append((module, rows.shape[1:], sample.double()))

    def find_difference(
        self, mine: Tensor, other: LayerInputs, theirs: Tensor, tolerance: float, silent: Collection[nn.Module]
    ) -> nn.Module | None:
        """Return the first layer that receives something else for examples here than for the same in another batch.

        Args:
            mine: the places of the examples among :attr:`numbers`.
            other: the inputs of the same layers in the other batch.
            theirs: their places among ``other.numbers``.
            tolerance: relative to each entry, and a thousandth of it to the largest entry of the input.
            silent: layers to leave out.
        """
        for one, two in zip(self.samples, other.samples, strict=False):
            # Inputs that all examples share have another shape.
            if one is None or two is None or one[1] != two[1] or one[0] in silent:
                continue
            here, there = one[2][mine.to(one[2].device)], two[2][theirs.to(two[2].device)]
            size = torch.maximum(here.abs(), there.abs()) + here[:, -1:] / 1000
            if bool(((here - there).abs() > tolerance * size).any()):
                return one[0]
        return None


@dataclass(frozen=True)
class _Picked:
    """Examples of a chunk.

    Attributes:
        batch: the examples.
        outputs: of the examples in their chunk.
        largest: output of the chunk.
        inputs: of layers in the chunk, if they were watched.
        places: of the examples among ``inputs.numbers``.
        silent: parameters without gradients so far: what their layers receive makes no difference.
    """

    batch: Batch
    outputs: Tensor
    largest: Tensor
    inputs: LayerInputs | None
    places: Tensor
    silent: frozenset[str]


class IndependenceCheck:
    """Checks that examples of each chunk have the same outputs, and give layers the same inputs, in another batch.

    The first examples, which are probed, need not show that others are coupled, or that longer batches are reordered.
    All examples of a chunk that is longer than all before it are run in two halves, in another order. An example of
    each other chunk is run alone if it is one of the first, and else together with those of other chunks, which is
    cheaper: a model that couples examples couples them with others there.

    Args:
        problem: the model, loss and data.
        get_probe: returns how to sweep a batch.
        limit: returns the bytes of working memory.
        is_known: returns whether an earlier measurement has found that the examples are independent.
    """

    def __init__(
        self,
        problem: Problem,
        get_probe: Callable[[Batch], Probe],
        limit: Callable[[], int],
        is_known: Callable[[], bool],
    ) -> None:
        self._problem, self._get_probe, self._limit, self._is_known = problem, get_probe, limit, is_known
        self._seen: set[tuple[int, int, bool]] = set()
        self._picked: list[_Picked] = []
        self._inputs: LayerInputs | None = None
        self._rounding = 0.0  # of the outputs of the examples picked
        self._most = 0  # examples of a chunk so far

    def _is_longest(self, batch: Batch) -> bool:
        return batch.examples > self._most and not self._is_known()

    @contextmanager
    def watch(self, batch: Batch, found: Probe, strategy: str) -> Iterator[None]:
        """Record what layers receive in the forward pass of a chunk, if its examples are run together.

        Chunks of models that are known to reorder examples by their values have a check of their own.
        """
        self._inputs = None
        is_new = batch.examples > 1 and _identify(batch) not in self._seen
        if is_new and strategy in TOGETHER and not found.is_doubtful:
            numbers = range(batch.examples) if self._is_longest(batch) else [_pick(batch)]
            self._inputs = LayerInputs(batch.examples, numbers)
        with self._problem.network.watch_inputs(None if self._inputs is None else self._inputs.add):
            yield

    def add(self, batch: Batch, outputs: Tensor, rounding: float = 0.0) -> None:
        """Pick examples of a chunk; outputs may differ by a fraction ``rounding`` of the largest."""
        inputs, self._inputs = self._inputs, None
        if batch.examples == 1 or _identify(batch) in self._seen:
            return
        self._seen.add(_identify(batch))
        found, is_longest = self._get_probe(batch), self._is_longest(batch)
        largest, silent = outputs.detach().abs().max(), frozenset(found.silent)
        self._rounding, self._most = rounding, max(self._most, batch.examples)

        def pick(numbers: Tensor, places: Tensor) -> _Picked:
            own = outputs[numbers.to(outputs.device)].detach().clone()
            return _Picked(batch.take(numbers, batch.first), own, largest, inputs, places, silent)

        if is_longest:
            order = torch.randperm(batch.examples, generator=torch.Generator().manual_seed(batch.examples))
            for half in order.chunk(2):
                _check_same(self._problem, [pick(half, half)], max(found.tolerance, rounding))
            return
        self._picked.append(pick(torch.tensor([_pick(batch)]), torch.tensor([0])))
        fitting = compute_working_memory(self._limit()) // (found.fixed + found.moving)
        alone = len(self._seen) <= ALONE and not self._is_known()
        if alone or len(self._picked) >= min(JOINED, fitting):
            self.finish()

    def finish(self) -> None:
        """Check the examples picked since the last time."""
        picked, self._picked = self._picked, []
        while picked:
            first = picked[0]
            shape = first.outputs.shape
            alike = [each for each in picked if can_join(first.batch, each.batch) and each.outputs.shape == shape]
            alike = alike or [first]
            picked = [each for each in picked if not any(each is other for other in alike)]
            tolerance = max(self._get_probe(first.batch).tolerance, self._rounding)
            _check_same(self._problem, alike, tolerance)


def _identify(batch: Batch) -> tuple[int, int, bool]:
    return batch.first, batch.examples, batch.places is None


def _pick(batch: Batch) -> int:
    """Return the place of an example, another one in every chunk."""
    return int(torch.randint(batch.examples, (1,), generator=torch.Generator().manual_seed(batch.first)))


def _check_same(problem: Problem, picked: Sequence[_Picked], tolerance: float) -> None:
    """Check that examples have the same outputs together as in their chunks, and give layers the same inputs."""
    batch, network = join_batches([each.batch for each in picked]), problem.network
    inputs = LayerInputs(batch.examples, range(batch.examples))
    is_watched = any(each.inputs is not None for each in picked)
    with torch.no_grad(), network.watch_inputs(inputs.add if is_watched else None):
        found = network(batch, (lambda module, x, y: y) if is_watched else None)
    outputs = torch.cat([each.outputs for each in picked])
    if found.shape != outputs.shape:
        raise make_coupled_error()
    off = (found - outputs.to(found)).abs().reshape(batch.examples, -1).amax(1)
    largest = torch.cat([each.largest.expand(each.batch.examples) for each in picked]).to(off)
    if not bool((off <= tolerance * largest).all()):
        raise make_coupled_error()
    start = 0
    for each in picked:
        theirs, start = torch.arange(start, start + each.batch.examples), start + each.batch.examples
        if each.inputs is None:
            continue
        silent = [module for module, layer in network.layers.items() if each.silent.issuperset(layer.names.values())]
        moved = each.inputs.find_difference(each.places, inputs, theirs, AMPLIFIED * tolerance, silent)
        if moved is not None and len(picked) > 1:  # these examples may have been reordered, and not their chunks
            _check_same(problem, [each], tolerance)
        elif moved is not None:
            raise _make_moved_error(network, moved)


def _make_moved_error(network: Network, module: nn.Module) -> MovedExamplesError:
    name = next(name for name, each in network.model.named_modules() if each is module)
    return MovedExamplesError(
        "Expected a model that keeps examples in their places in the batch, but got one whose layer "
        f"{name!r} receives other values for an example in a batch than for the same example elsewhere, although its "
        "outputs are the same: the model reorders the batch. Try batches of one example (batch_size=1)."
    )
