"""The first examples, run twice and taken apart: is the model a fixed function of each, and how is it best swept?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from saltflat import passes
from saltflat.data import Batch
from saltflat.errors import (
    CoupledExamplesError,
    ModelError,
    NondeterministicError,
    NonFiniteError,
    OptionError,
    SaltflatError,
    first_line,
)
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

# What torch and Python raise when shapes, types or arguments do not fit.
USUAL = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)

PAIRS = 4  # of examples at most, looked at while the first have no gradient
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
        return max(1, fit)

    def columns(self, examples: int, limit: int) -> int:
        """How many columns to propagate at once with so many examples."""
        return max(1, (limit // examples - self.fixed) // self.moving)

    def forward(self, problem: Problem, batch: Batch, way: str | None = None) -> tuple[Tensor, passes.Backward]:
        """Outputs, checked, and the backward pass."""
        way = way or self.way
        if way == "together" and batch.examples > 1:
            outputs, backward = passes.together(problem.network, batch, expected=self.calls)
        else:
            outputs, backward = WAYS[way](problem.network, batch)
        problem.check_outputs(outputs, batch)
        return outputs, backward


def probe(problem: Problem, batch: Batch) -> Probe:
    """Run examples of a batch in pairs and alone, and choose the quickest way that gives what single examples give."""
    pairs = [batch.cut(start, start + 2) for start in range(0, min(batch.examples, 2 * PAIRS), 2)]
    try:
        with torch.no_grad(), _Noticing() as noticed:
            outputs = problem.network(pairs[0])
    except USUAL as error:
        if isinstance(error, SaltflatError):
            raise
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in pairs[0].tensors())
        raise ModelError(
            f"Got {first_line(error)} from the model on the first examples (inputs {shapes}). "
            "Want a model that runs on this data. Do: check the inputs' shape and type against the model's."
        ) from error
    problem.check_outputs(outputs, pairs[0])
    try:
        _check_loss(problem, outputs, pairs[0])
    except USUAL as error:
        if isinstance(error, SaltflatError):
            raise
        raise OptionError(
            f"Got {first_line(error)} from the loss on the first examples. "
            "Want a function of (outputs, targets) that fits them. Do: check it on one batch of the model's outputs."
        ) from error
    taken = [_taken_apart(problem, single) for single in _singles(pairs[0])]
    _check_fixed(problem, pairs[0], outputs, [alone for alone, _, _ in taken])
    _, first, needs = taken[0]
    truths = [_total([squares for _, squares, _ in taken])]
    # A gradient of zero agrees with everything: look at more examples as long as some parameter has no other.
    for pair in pairs[1:]:
        if not _silent(truths):
            break
        truths.append(_total([_taken_apart(problem, single)[1] for single in _singles(pair)]))
    checks = [(pair, truth) for pair, truth in zip(pairs, truths, strict=False) if pair.examples > 1]
    ways = ["together", "mapped"]
    if not checks or len(_silent(truths)) == len(first) or noticed.sizes:
        # Examples that take different paths through the layers have to take them alone.
        ways = []
    elif noticed.order:
        # Ones that are put into another order can be mapped.
        ways.remove("together")
    way = next((way for way in ways if all(_agrees(problem, way, *check) for check in checks)), None)
    way = way or ("single" if _agrees(problem, "single", batch.cut(0, 1), first) else LOOPED)
    # A backward pass holds a few activations' gradients at a time, a vectorised or a looped one all of them.
    streams = needs.activations + needs.factors if way in ("mapped", LOOPED) else 5 * needs.widest
    # The columns themselves are made in float64.
    moving = streams + 2 * needs.moving + 24 * outputs[0].numel()
    # What a CPU's heap holds is about twice what is in use: arrays of many sizes leave gaps. On a GPU the kernels of
    # convolutions take working memory of their own.
    held = 2 if outputs.device.type == "cpu" else 1.3
    return Probe(way, int(held * needs.fixed), int(held * moving), needs.widest, needs.calls)


def _singles(batch: Batch) -> list[Batch]:
    return [batch.cut(n, n + 1) for n in range(batch.examples)]


def _total(squares: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((other[name] for other in squares[1:]), squares[0][name]) for name in squares[0]}


def _silent(truths: list[dict[str, Tensor]]) -> list[str]:
    """Parameters whose gradient was zero so far."""
    largest = {
        name: torch.stack([truth[name].abs().amax() for truth in truths]).amax() if value.numel() else torch.ones(())
        for name, value in truths[0].items()
    }
    return [name for name, size in largest.items() if size == 0]


class _Noticing(TorchDispatchMode):
    """Notices operations that may treat the examples of a batch by their values.

    ``sizes``: results whose size depends on values (masks, experts). ``order``: sorting, and numbers read from tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = self.order = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if torch.Tag.dynamic_output_shape in func.tags:
            # Indexing by numbers has the size of the numbers.
            masks = func is not aten.index.Tensor or any(i is not None and i.dtype == torch.bool for i in args[1])
            self.sizes |= masks
        elif func.overloadpacket in (aten.sort, aten.argsort, aten.topk) or (
            func is aten._local_scalar_dense.default and args[0].dtype != torch.bool
        ):
            self.order = True
        return func(*args, **(kwargs or {}))


def _check_fixed(problem: Problem, batch: Batch, outputs: Tensor, alone: Sequence[Tensor]) -> None:
    same = all(one.shape[1:] == outputs.shape[1:] for one in alone)
    if not same or not _close(outputs, torch.cat(list(alone)), TOLERANCE[outputs.dtype]):
        raise _no_fixed_function(problem, batch, outputs)


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
    """One example by the definition; the model has already run on a batch, so an error here is about one example."""
    try:
        return _by_definition(problem, single)
    except SaltflatError:
        raise
    except Exception as error:
        raise ModelError(
            f"Got an error for example {single.first} alone from a model that runs on a batch: "
            f"{type(error).__name__}: {error}. Want a model that can be differentiated for a single example. "
            "Do: check inputs whose first axis is not that of the examples, checkpointing and sparse gradients."
        ) from error


def _by_definition(problem: Problem, single: Batch) -> tuple[Tensor, dict[str, Tensor], _Sizes]:
    """One example by the definition: its outputs, its squared gradients, and the sizes of what that went through."""
    network = problem.network
    constants = {value.untyped_storage().data_ptr() for value in network.constants.values()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor
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
