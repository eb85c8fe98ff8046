"""The first examples, run twice and taken apart: is the model a fixed function of each, and how is it best swept?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from saltflat import passes
from saltflat.data import Batch
from saltflat.errors import CoupledExamplesError, NondeterministicError, NonFiniteError, SaltflatError
from saltflat.forms import Form
from saltflat.network import Network
from saltflat.problem import Problem, real

Way = Callable[[Network, Batch], tuple[Tensor, passes.Backward]]

# The ways to take a chunk's gradients, the quickest first; `single` is `together` with chunks of one example.
LOOPED = "single, columns in a loop"
WAYS: dict[str, Way] = {
    "together": passes.together,
    "mapped": passes.mapped,
    "single": passes.together,
    LOOPED: partial(passes.together, loop=True),
}

PROBED = 2  # examples
# Chunks whose largest array of gradients has about this size run from the caches of a CPU; larger ones wait for memory.
CPU_CHUNK = 6 << 20

# Largest difference between two ways that is still rounding. A wrong split of the examples differs in the first digit.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


@dataclass(frozen=True)
class Probe:
    """How to sweep a problem, and what that takes.

    Attributes:
        way: a key of :data:`WAYS`.
        fixed: bytes per example, whatever the number of columns.
        moving: bytes per example and column.
        widest: bytes of the largest activation of one example.
        calls: what one example shows the layers.
    """

    way: str
    fixed: int
    moving: int
    widest: int
    calls: passes.Calls

    def examples(self, batch: Batch, columns: int, limit: int) -> int:
        """How many examples of a batch to take at once."""
        fit = limit // (self.fixed + self.moving * min(columns, self.columns(1, limit)))
        if batch.targets.device.type == "cpu":
            fit = min(fit, CPU_CHUNK // (self.widest * columns))
        # Longer sequences than those probed take more.
        longer = passes.Calls.of(batch, []).elements / max(1, self.calls.elements)
        return max(1, int(fit / max(1.0, longer)))

    def columns(self, examples: int, limit: int) -> int:
        """How many columns to propagate at once with so many examples."""
        return max(1, (limit // examples - self.fixed) // self.moving)

    def forward(self, problem: Problem, batch: Batch) -> tuple[Tensor, passes.Backward]:
        """Outputs, checked, and the backward pass."""
        if self.way == "together" and batch.examples > 1:
            outputs, backward = passes.together(problem.network, batch, expected=self.calls)
        else:
            outputs, backward = WAYS[self.way](problem.network, batch)
        problem.check_outputs(outputs, batch)
        return outputs, backward


def probe(problem: Problem) -> Probe:
    """Run the first examples twice and choose the quickest way that gives what single examples give."""
    batch = _first_examples(problem)
    network = problem.network
    with torch.no_grad(), _Shapes() as shapes:
        outputs = network(batch)
    problem.check_outputs(outputs, batch)
    _check_loss(problem, outputs, batch)
    singles = [batch.cut(n, n + 1) for n in range(batch.examples)]
    alone, squares, (sizes, *_) = zip(*(_taken_apart(problem, single) for single in singles), strict=True)
    if not _close(outputs, torch.cat(alone), TOLERANCE[outputs.dtype]):
        raise _no_fixed_function(problem, batch, outputs)
    truth = {name: sum((other[name] for other in squares[1:]), squares[0][name]) for name in squares[0]}
    # Examples that take different paths through the layers have to take them alone.
    ways = () if batch.examples == 1 or shapes.depend_on_values else ("together", "mapped")
    way = next((way for way in ways if _agrees(problem, way, batch, truth)), None)
    way = way or ("single" if _agrees(problem, "single", singles[0], squares[0]) else LOOPED)
    # A backward pass holds a few activations' gradients at a time, a vectorised or a looped one all of them.
    streams = sizes.activations + sizes.factors if way in ("mapped", LOOPED) else 5 * sizes.widest
    # What a CPU's heap holds is about twice what is in use: arrays of many sizes leave gaps.
    gaps = 2 if outputs.device.type == "cpu" else 1
    return Probe(way, gaps * sizes.fixed, gaps * (streams + 2 * sizes.moving), sizes.widest, sizes.calls)


class _Shapes(TorchDispatchMode):
    """Notices operations whose results have a size that depends on values: masks, experts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depend_on_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags:
            # Indexing by numbers has the size of the numbers.
            masks = func is not torch.ops.aten.index.Tensor or any(
                i is not None and i.dtype == torch.bool for i in args[1]
            )
            self.depend_on_values |= masks
        return func(*args, **(kwargs or {}))


def _no_fixed_function(problem: Problem, batch: Batch, outputs: Tensor) -> SaltflatError:
    """Why an example has other outputs in a batch than alone."""
    with torch.no_grad():
        again = problem.network(batch)
    if not _close(outputs, again, TOLERANCE[outputs.dtype]):
        names = [name for name, m in problem.model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        return NondeterministicError(
            "Got different outputs from the same inputs: the model draws random numbers even in eval mode"
            f"{' (it has dropout: ' + ', '.join(names[:3]) + ')' if names else ''}. Want a fixed function. "
            "Do: make its randomness depend on self.training, or turn it off."
        )
    return CoupledExamplesError(
        "Got other outputs for an example in a batch than for the same example alone. "
        "Want a model that treats examples independently: per-example gradients mean nothing otherwise. "
        "Do: replace layers that mix the batch (BatchNorm without running statistics, attention across the batch)."
    )


def _first_examples(problem: Problem) -> Batch:
    """A few examples of the first batch that has several."""
    first: Batch | None = None
    for number, batch in enumerate(problem.batches()):
        if batch.examples > 1:
            return batch.cut(0, PROBED)
        first = first or batch
        if number == 8:
            break
    assert first is not None
    return first


def _check_loss(problem: Problem, outputs: Tensor, batch: Batch) -> None:
    targets = real(batch.targets)
    problem.loss.check(outputs.double(), targets)
    if not bool(problem.loss.total(outputs.double(), targets).isfinite().all()):
        raise NonFiniteError(
            "Got a NaN or infinite loss on the first examples. Want a finite one. Do: check loss and targets."
        )


def _agrees(problem: Problem, way: str, batch: Batch, truth: dict[str, Tensor]) -> bool:
    try:
        found = _squares(problem, way, batch)
    except SaltflatError:
        raise
    except Exception:
        # Whatever keeps this way from working (an operation without a vectorised form, examples that cannot be told
        # apart, control flow on values), the slower ways are there for it.
        return False
    names = [name for name, value in truth.items() if value.numel()]
    off = torch.stack([(found[name] - truth[name]).abs().max() for name in names])
    size = torch.stack([truth[name].abs().max() for name in names])
    # A parameter without effect (a key's bias) has nothing but rounding to compare.
    floor = torch.finfo(size.dtype).eps * size.max()
    return bool((off <= TOLERANCE[size.dtype] * torch.maximum(size, floor)).all())


def _squares(problem: Problem, way: str, batch: Batch) -> dict[str, Tensor]:
    """Sums of squared per-example gradients for a random column; an example has the same one in every batch."""
    outputs, backward = WAYS[way](problem.network, batch)
    found = {name: torch.zeros_like(value) for name, value in problem.network.measured.items()}

    def emit(name: str, form: Form) -> None:
        found[name] = form.squares()

    backward(_random_column(outputs, batch), emit, True)
    return found


def _random_column(outputs: Tensor, batch: Batch) -> Tensor:
    each = []
    for n in range(batch.examples):
        noise = torch.Generator().manual_seed(batch.first + n)
        each.append(torch.randn((1, *outputs.shape[1:]), generator=noise, dtype=torch.float64))
    return torch.stack(each, 1).to(outputs)


@dataclass(frozen=True)
class _Sizes:
    """What one example takes, in bytes, and shows the layers."""

    fixed: int
    moving: int
    widest: int
    activations: int
    factors: int
    calls: passes.Calls


def _taken_apart(problem: Problem, single: Batch) -> tuple[Tensor, dict[str, Tensor], _Sizes]:
    """One example by the definition: its outputs, its squared gradients, and the sizes of what that went through."""
    network = problem.network
    constants = {value.untyped_storage().data_ptr() for value in network.constants.values()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Not the bytes of the storage: an example is a slice of its batch.
        where, size = tensor.untyped_storage().data_ptr(), tensor.numel() * tensor.element_size()
        if where not in constants:
            saved[where] = max(size, saved.get(where, 0))
        return tensor

    record: list[tuple[nn.Module, Tensor, Tensor]] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs, backward = passes.together(network, single, loop=True, record=record)
    for _, x, _ in record:
        keep(x)
    found = {name: torch.zeros_like(value) for name, value in network.measured.items()}
    factors: list[tuple[int, int]] = [(0, 0)]

    def emit(name: str, form: Form) -> None:
        found[name] = form.squares()
        factors.append(form.sizes())

    backward(_random_column(outputs, single), emit, True)
    activations = [outputs.numel() * outputs.element_size(), *(y.numel() * y.element_size() for _, _, y in record)]
    still, moving = (max(part) for part in zip(*factors, strict=True))
    calls = passes.Calls.of(single, [(module, x.shape) for module, x, _ in record])
    every = sum(each for _, each in factors)
    return outputs, found, _Sizes(sum(saved.values()) + still, moving, max(activations), sum(activations), every, calls)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
