"""Try a strategy on examples whose gradients are known: whether it is right, and the memory an example needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from saltflat.engine import per_example
from saltflat.engine.data import Batch
from saltflat.engine.expanded import find_uses, run_expanded
from saltflat.engine.network import is_packed
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import (
    ReferenceGradients,
    compute_rounding,
    find_differences,
    is_near_reference,
)
from saltflat.errors import SaltflatError
from saltflat.gradients.base import FactoredGradient

# Called with a network and a batch; strategies of several examples together also with the calls of layers to expect.
Strategy = Callable[..., tuple[Tensor, per_example.Backward]]

# How to compute a chunk's gradients, the fastest strategy first; `single` is `together` with chunks of one example.
EXPANDED = "together, expanded"
TOGETHER = ("together", EXPANDED)
LOOPED = "single, columns in a loop"
PLAIN = "single, without rules of layers"
STRATEGIES: dict[str, Strategy] = {
    "together": per_example.run_batched,
    EXPANDED: run_expanded,
    "mapped": per_example.run_vmapped,
    "single": per_example.run_batched,
    LOOPED: partial(per_example.run_batched, loop=True),
    PLAIN: partial(per_example.run_batched, loop=True, rules=False),
}

# What a trial shows: the gradients are right; they are wrong; or something (an operation that cannot be vectorized,
# examples that cannot be separated, control flow on values) keeps the strategy from working.
Outcome: TypeAlias = Literal["right", "wrong", "fails"]

# Of a random column: alone, and two at once. Not all of torch's backward passes are right under vmap for more than one.
MULTIPLES = (1.0,), (1.0, -2.0)


def run_strategy(
    problem: Problem, strategy: str, batch: Batch, calls: per_example.LayerCalls
) -> tuple[Tensor, per_example.Backward]:
    """Return the outputs and the backward pass; ``calls`` are those of layers for one example of the same shapes."""
    if (strategy in TOGETHER and batch.examples > 1) or strategy == EXPANDED:
        return STRATEGIES[strategy](problem.network, batch, expected=calls)
    return STRATEGIES[strategy](problem.network, batch)


def try_strategy(problem: Problem, strategy: str, truth: ReferenceGradients, calls: per_example.LayerCalls) -> Outcome:
    """Return whether a strategy computes the reference gradients of every example, for each parameter."""
    # More than a pair of examples may only just fit into memory with one column.
    comparisons = [
        GradientComparison(problem, truth, each) for each in (MULTIPLES if truth.gradients else MULTIPLES[:1])
    ]
    try:
        _, backward = run_strategy(problem, strategy, truth.batch, calls)
        for comparison in comparisons:
            backward(comparison.columns, comparison.emit, comparison is comparisons[-1])
    except SaltflatError:
        raise
    except Exception:
        return "fails"
    return "right" if all(comparison.is_consistent() for comparison in comparisons) else "wrong"


def try_strategies(
    problem: Problem, strategies: Sequence[str], checks: Sequence[ReferenceGradients], calls: per_example.LayerCalls
) -> dict[str, Outcome]:
    """Try strategies in this order until one passes all checks; return what came of each that was tried."""
    outcomes: dict[str, Outcome] = {}
    for strategy in strategies:
        tried = (try_strategy(problem, strategy, check, calls) for check in checks)
        outcomes[strategy] = next((outcome for outcome in tried if outcome != "right"), "right")
        if outcomes[strategy] == "right":
            break
    return outcomes


@dataclass(frozen=True)
class StrategyChoice:
    """The fastest strategy that is right.

    Attributes:
        strategy: its name; None if none is right.
        calls: the calls of layers and the uses of parameters that it expects.
        blocked: the parameters with uses that do not allow a copy for each example, and why.
        was_wrong: whether one that was tried gave wrong gradients.
    """

    strategy: str | None
    calls: per_example.LayerCalls
    blocked: dict[str, str]
    was_wrong: bool


def choose_strategy(
    problem: Problem,
    strategies: Sequence[str],
    checks: Sequence[ReferenceGradients],
    alone: Sequence[ReferenceGradients],
    calls: per_example.LayerCalls,
) -> StrategyChoice:
    """Return the fastest strategy that reproduces the reference gradients.

    Args:
        problem: the model, loss and data.
        strategies: those for several examples that the model's operations allow.
        checks: the references for them.
        alone: the reference for one example alone; none if its columns have to be propagated in a loop.
        calls: of layers, for one example.
    """
    outcomes: dict[str, Outcome] = {}
    blocked: dict[str, str] = {}
    for strategy in strategies:
        outcomes |= try_strategies(problem, [strategy], checks, calls)
        if strategy == "together" and outcomes[strategy] != "right":
            # Parameters are used outside of layers with a rule, or in layers that do not see the examples.
            uses = find_uses(problem.network, [each.batch for each in (*checks, *alone)], calls)
            if uses is not None:
                blocked = dict(uses.blocked)
            if uses is not None and not uses.blocked:
                strategy = EXPANDED
                outcomes |= try_strategies(problem, [strategy], [*checks, *alone], uses)
                calls = uses if outcomes[strategy] == "right" else calls
        if outcomes[strategy] == "right":
            break
    if alone and "right" not in outcomes.values():
        outcomes |= try_strategies(problem, ["single"], alone, calls)
    right = next((each for each, outcome in outcomes.items() if outcome == "right"), None)
    return StrategyChoice(right, calls, blocked, "wrong" in outcomes.values())


class GradientComparison:
    """Compares gradients with the reference as they are emitted.

    Args:
        problem: the model, loss and data.
        truth: the reference.
        multiples: which multiples of the reference's column are propagated together.

    Attributes:
        columns: these multiples.
    """

    def __init__(self, problem: Problem, truth: ReferenceGradients, multiples: Sequence[float] = (1.0,)) -> None:
        self.truth, measured = truth, problem.network.measured
        self.multiples = truth.columns.new_tensor(multiples)
        self.columns = torch.cat([truth.columns * each for each in multiples])
        self.squares = {name: torch.zeros_like(value) for name, value in measured.items()}
        self.along = {name: value.new_zeros(len(multiples), truth.batch.examples) for name, value in measured.items()}

    def emit(self, name: str, form: FactoredGradient) -> None:
        """Receive the gradients of a parameter."""
        along = form.project(self.truth.directions[name])
        if along.shape != self.along[name].shape:
            raise per_example.NotBatchableError(f"gradients of {name} for other columns or examples")
        self.along[name] = along / self.multiples[:, None]
        if self.truth.gradients:
            self.squares[name] = form.sum_squares() / self.multiples.square().sum()

    def is_consistent(self) -> bool:
        """Return whether all gradients agree with the reference up to rounding."""
        truth, squares, along = self.truth, self.squares, self.along
        if not truth.gradients:
            return is_near_reference(torch.stack([each.double() for each in along.values()]).sum(0), truth)
        rounding = compute_rounding(truth.columns, truth.coarsest)
        if find_differences(squares, truth.squares, truth.squares, truth, rounding**2, degree=2):
            return False
        # Sums over the examples do not show that examples were swapped, but projections do. The directions are scaled
        # so that rounding is below the tolerance.
        return not find_differences(along, truth.projections, truth.sizes, truth, truth.tolerance)


def measure_gradient_bytes(
    problem: Problem, strategy: str, truth: ReferenceGradients, calls: per_example.LayerCalls
) -> int:
    """Return the bytes of the largest gradient of a parameter that a strategy computes, by example and column."""
    sizes = [0]
    _, backward = run_strategy(problem, strategy, truth.batch, calls)
    backward(truth.columns, lambda name, form: sizes.append(form.count_bytes()[1]), True)
    return max(sizes)


@dataclass(frozen=True)
class ExampleCost:
    """The memory one example needs, in bytes, the calls of layers, and the parameters used outside of them."""

    fixed: int
    moving: int
    widest: int
    activations: int
    factors: int
    calls: per_example.LayerCalls
    outside: tuple[str, ...]


def measure_example_cost(
    problem: Problem, truth: ReferenceGradients, strategy: str, results: int
) -> ExampleCost | None:
    """Return the cost of an example, from a pass of it alone in a looped strategy, or None if its gradients are wrong.

    ``results`` are the bytes of all results of its forward pass.
    """
    single = truth.batch
    network = problem.network
    constants = {each.untyped_storage().data_ptr() for each in network.constants.values() if not is_packed(each)}
    saved: dict[int, int] = {}

    def record_saved(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor
        # Not the bytes of the storage: an example is a slice of its batch.
        where, size = tensor.untyped_storage().data_ptr(), tensor.numel() * tensor.element_size()
        if where not in constants:
            saved[where] = max(size, saved.get(where, 0))
        return tensor

    record = per_example.PassRecord()
    factors: list[tuple[int, int]] = [(0, 0)]
    comparison = GradientComparison(problem, truth)

    def emit(name: str, form: FactoredGradient) -> None:
        factors.append(form.count_bytes())
        comparison.emit(name, form)

    try:
        try:
            with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
                outputs, backward = STRATEGIES[strategy](network, single, record=record)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            # torch.func transforms inside the model do not allow hooks. At most all results are saved.
            record = per_example.PassRecord()
            outputs, backward = STRATEGIES[strategy](network, single, record=record)
            saved[0] = results
        backward(truth.columns, emit, True)
    except SaltflatError:
        raise
    except Exception:
        if strategy == PLAIN:
            raise
        return None
    if strategy != PLAIN and not comparison.is_consistent():
        return None
    for _, x, _ in record.calls:
        record_saved(x)
    activations = [
        outputs.numel() * outputs.element_size(),
        *(y.numel() * y.element_size() for _, _, y in record.calls),
    ]
    still, moving = (max(part) for part in zip(*factors, strict=True))
    calls = per_example.LayerCalls.from_batch(single, [(module, x.shape) for module, x, _ in record.calls])
    every = sum(each for _, each in factors)
    return ExampleCost(
        sum(saved.values()) + still, moving, max(activations), sum(activations), every, calls, tuple(record.outside)
    )
