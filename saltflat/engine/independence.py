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
from saltflat.engine.per_example import NotBatchableError, split_examples
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import make_coupled_error
from saltflat.engine.strategy import Probe, compute_working_memory
from saltflat.engine.strategy_trial import TOGETHER
from saltflat.errors import CoupledExamplesError

ALONE, JOINED = 4, 16  # examples of the first chunks that are run alone, and of later ones that are run at once
ENTRIES = 64  # of a layer's input that are compared
AMPLIFIED = 10.0  # how much larger rounding may be inside of a model than at its outputs


class MovedExamplesError(NotBatchableError):
    """Raised if a layer receives the examples of a chunk in other places than the batch has them."""


class _MovedExamplesError(CoupledExamplesError):
    """The same, found when the chunk has been added."""


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
        entries = flat[:, :: max(1, flat.shape[1] // ENTRIES)][:, :ENTRIES]
        sample = torch.cat([entries, flat.abs().amax(1, keepdim=True)], 1)
        self.samples.append((module, rows.shape[1:], sample.double()))

    def find_difference(
        self, other: LayerInputs, place: int, tolerance: float, silent: Collection[nn.Module]
    ) -> nn.Module | None:
        """Return the first layer that receives something else for the one example here than for one of another batch.

        Args:
            other: the inputs of the same layers in the other batch.
            place: of the example among ``other.numbers``.
            tolerance: relative to the largest entry of the input.
            silent: layers to leave out.
        """
        for one, two in zip(self.samples, other.samples, strict=False):
            # Inputs that all examples share have another shape.
            if one is None or two is None or one[1] != two[1] or one[0] in silent:
                continue
            off = (one[2][0] - two[2][place]).abs()
            if bool((off > tolerance * one[2][0, -1]).any()):
                return one[0]
        return None


@dataclass(frozen=True)
class _PickedExample:
    """An example of a chunk.

    Attributes:
        batch: the example.
        outputs: of the example in its chunk.
        largest: output of the chunk.
        inputs: of layers in the chunk, if they were watched.
        silent: parameters without gradients so far: what their layers receive makes no difference.
    """

    batch: Batch
    outputs: Tensor
    largest: Tensor
    inputs: LayerInputs | None
    silent: frozenset[str]


class IndependenceCheck:
    """Checks that an example of each chunk has the same outputs, and gives layers the same inputs, in another batch.

    The first examples, which are probed, need not show that others are coupled, or that longer batches are reordered.
    Examples of the first chunks, and of any that is longer than all before it, are run alone. Those of others are run
    together, which is cheaper: a model that couples examples couples them with others there.

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
        self._picked: list[_PickedExample] = []
        self._inputs: LayerInputs | None = None
        self._rounding = 0.0  # of the outputs of the examples picked
        self._most = 0  # examples of a chunk so far

    @contextmanager
    def watch(self, batch: Batch, strategy: str) -> Iterator[None]:
        """Record what layers receive in the forward pass of a chunk, if its examples are run together."""
        self._inputs = None
        if batch.examples > 1 and strategy in TOGETHER and _identify(batch) not in self._seen:
            self._inputs = LayerInputs(batch.examples, [_pick(batch)])
        with self._problem.network.watch_inputs(None if self._inputs is None else self._inputs.add):
            yield

    def add(self, batch: Batch, outputs: Tensor, rounding: float = 0.0) -> None:
        """Pick an example of a chunk; outputs may differ by a fraction ``rounding`` of the largest.

        Raise :class:`MovedExamplesError` if this very chunk has to be run in another way.
        """
        inputs, self._inputs = self._inputs, None
        if batch.examples == 1 or _identify(batch) in self._seen:
            return
        self._seen.add(_identify(batch))
        number = _pick(batch)
        one = batch.take(torch.tensor([number]), batch.first)
        own = outputs[number : number + 1].detach().clone()
        found = self._get_probe(batch)
        self._picked.append(_PickedExample(one, own, outputs.detach().abs().max(), inputs, frozenset(found.silent)))
        self._rounding = rounding
        fitting = compute_working_memory(self._limit()) // (found.fixed + found.moving)
        is_longest, self._most = batch.examples > self._most, max(self._most, batch.examples)
        if (len(self._seen) <= ALONE or is_longest) and not self._is_known():
            try:
                self.finish()
            except _MovedExamplesError as error:
                raise MovedExamplesError(str(error)) from error
        elif len(self._picked) >= min(JOINED, fitting):
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
    return (batch.first * 7919 + batch.examples // 2) % batch.examples


def _check_same(problem: Problem, picked: Sequence[_PickedExample], tolerance: float) -> None:
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
    if not bool((off <= tolerance * torch.stack([each.largest for each in picked]).to(off)).all()):
        raise make_coupled_error()
    for place, each in enumerate(picked):
        if each.inputs is None:
            continue
        silent = [module for module, layer in network.layers.items() if each.silent.issuperset(layer.names.values())]
        moved = each.inputs.find_difference(inputs, place, AMPLIFIED * tolerance, silent)
        if moved is not None and len(picked) > 1:  # these examples may have been reordered, and not their chunks
            _check_same(problem, [each], tolerance)
        elif moved is not None:
            raise _make_moved_error(network, moved)


def _make_moved_error(network: Network, module: nn.Module) -> _MovedExamplesError:
    name = next(name for name, each in network.model.named_modules() if each is module)
    return _MovedExamplesError(
        "Expected a model that keeps examples in their places in the batch, but got one whose layer "
        f"{name!r} receives other values for an example in a batch than for the same example alone, although its "
        "outputs are the same: the model reorders the batch. Try batches of one example (batch_size=1)."
    )
