"""The first examples, run twice and taken apart: is the model a fixed function of each example, and how is it best swept?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

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

PROBED = 4  # examples
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

    def examples(self, columns: int, limit: int, device: torch.device) -> int:
        """How many examples to take at once."""
        fit = limit // (self.fixed + self.moving * min(columns, self.columns(1, limit)))
        if device.type == "cpu":
            fit = min(fit, CPU_CHUNK // (self.widest * columns))
        return max(1, fit)

    def columns(self, examples: int, limit: int) -> int:
        """How many columns to propagate at once."""
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
    with torch.no_grad():
        outputs, again = network(batch), network(batch)
    problem.check_outputs(outputs, batch)
    tolerance = TOLERANCE[outputs.dtype]
    if not _close(outputs, again, tolerance):
        names = [name for name, m in problem.model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        raise NondeterministicError(
            "Got different outputs from the same inputs: the model draws random numbers even in eval mode"
            f"{' (it has dropout: ' + ', '.join(names[:3]) + ')' if names else ''}. Want a fixed function. "
            "Do: make its randomness depend on self.training, or turn it off."
        )
    _check_loss(problem, outputs, batch)
    singles = [batch.cut(n, n + 1) for n in range(batch.examples)]
    with torch.no_grad():
        alone = torch.cat([network(single) for single in singles])
    if not _close(outputs, alone, tolerance):
        raise CoupledExamplesError(
            "Got other outputs for an example in a batch than for the same example alone. Want a model that treats examples independently: "
            "per-example gradients mean nothing otherwise. Do: replace layers that mix the batch (BatchNorm without running statistics, "
            "attention across the batch)."
        )
    way = _way(problem, batch, singles)
    return Probe(way, *_sizes(problem, singles[0], way), calls=_calls(problem, singles[0]))


def _way(problem: Problem, batch: Batch, singles: list[Batch]) -> str:
    each = [_squares(problem, LOOPED, single) for single in singles]
    truth = {name: sum((other[name] for other in each[1:]), each[0][name]) for name in each[0]}
    # Examples that take different paths through the layers have to take them alone.
    if len(singles) > 1 and len({_calls(problem, single) for single in singles}) == 1:
        for way in ("together", "mapped"):
            if _agrees(problem, way, batch, truth):
                return way
    return "single" if _agrees(problem, "single", singles[0], each[0]) else LOOPED


def _calls(problem: Problem, single: Batch) -> passes.Calls:
    seen: list[tuple[nn.Module, torch.Size]] = []

    def tap(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append((module, x.shape))
        return y

    with torch.no_grad():
        problem.network(single, tap)
    return passes.Calls.of(single, seen)


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
        raise NonFiniteError("Got a NaN or infinite loss on the first examples. Want a finite one. Do: check loss and targets.")


def _agrees(problem: Problem, way: str, batch: Batch, truth: dict[str, Tensor]) -> bool:
    try:
        found = _squares(problem, way, batch)
    except SaltflatError:
        raise
    except Exception:
        # Whatever keeps this way from working (an operation without a vectorised form, examples that cannot be told apart, control
        # flow on values), the slower ways are there for it.
        return False
    # A parameter without effect (a key's bias) has nothing but rounding to compare.
    largest = max(float(value.abs().max()) for value in truth.values())
    return all(
        _close(found[name], value, TOLERANCE[value.dtype], torch.finfo(value.dtype).eps * largest)
        for name, value in truth.items()
    )


def _squares(problem: Problem, way: str, batch: Batch) -> dict[str, Tensor]:
    """Sums of squared per-example gradients for two random columns; an example has the same columns in every batch."""
    outputs, backward = WAYS[way](problem.network, batch)
    found = {name: torch.zeros_like(value) for name, value in problem.network.measured.items()}

    def emit(name: str, form: Form) -> None:
        found[name] = form.squares()

    each = []
    for n in range(batch.examples):
        noise = torch.Generator().manual_seed(batch.first + n)
        each.append(torch.randn((2, *outputs.shape[1:]), generator=noise, dtype=torch.float64))
    backward(torch.stack(each, 1).to(outputs), emit, True)
    return found


def _sizes(problem: Problem, single: Batch, way: str) -> tuple[int, int, int]:
    """Bytes one example takes: see :class:`Probe`."""
    network = problem.network
    constants = {value.untyped_storage().data_ptr() for value in network.constants.values()}
    anchor = torch.zeros((), dtype=next(iter(network.measured.values())).dtype, device=passes.device_of(network), requires_grad=True)
    saved: dict[int, int] = {}
    activations: list[int] = []
    factors: list[tuple[int, int]] = [(0, 0)]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constants:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def tap(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        keep(x)
        activations.append(y.numel() * y.element_size())
        return y + anchor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = network(single, tap)

    def emit(name: str, form: Form) -> None:
        factors.append(form.sizes())

    looped, backward = passes.together(network, single, loop=True)
    backward(torch.ones_like(looped).unsqueeze(0), emit, True)
    widest = max([outputs.numel() * outputs.element_size(), *activations])
    still, moving = (max(part) for part in zip(*factors, strict=True))
    direct = sum(moving for _, moving in factors)
    # A backward pass holds a few activations' gradients at a time, a vectorised one all of them.
    streams = sum(activations) + direct if way in ("mapped", LOOPED) else 4 * widest
    return sum(saved.values()) + still, streams + 2 * moving, widest


def _close(a: Tensor, b: Tensor, tolerance: float, floor: float = 0.0) -> bool:
    if a.shape != b.shape:
        return False
    return a.numel() == 0 or bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=floor))
