"""Try a strategy on examples whose gradients are known: whether it is right, and the memory an example needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from saltflat.engine import per_example
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import (
    ReferenceGradients,
    compute_rounding,
    find_differences,
    is_near_reference,
)
from saltflat.errors import SaltflatError
from saltflat.gradients.base import FactoredGradient

Strategy = Callable[..., tuple[Tensor, per_example.Backward]]  # called with a network and a batch

# How to compute a chunk's gradients, the fastest strategy first; `single` is `together` with chunks of one example.
LOOPED = "single, columns in a loop"
PLAIN = "single, without rules of layers"
STRATEGIES: dict[str, Strategy] = {
    "together": per_example.run_batched,
    "mapped": per_example.run_vmapped,
    "single": per_example.run_batched,
    LOOPED: partial(per_example.run_batched, loop=True),
    PLAIN: partial(per_example.run_batched, loop=True, rules=False),
}

# What a trial shows: the gradients are right; they are wrong; or something (an operation that cannot be vectorized,
# examples that cannot be separated, control flow on values) keeps the strategy from working.
Outcome: TypeAlias = Literal["right", "wrong", "fails"]


def try_strategy(problem: Problem, strategy: str, truth: ReferenceGradients) -> Outcome:
    """Return whether a strategy computes the reference gradients of every example, for each parameter."""
    comparison = GradientComparison(problem, truth)
    try:
        _, backward = STRATEGIES[strategy](problem.network, truth.batch)
        backward(truth.columns, comparison.emit, True)
    except SaltflatError:
        raise
    except Exception:
        return "fails"
    return "right" if comparison.is_consistent() else "wrong"


class GradientComparison:
    """Compares gradients with the reference as they are emitted."""

    def __init__(self, problem: Problem, truth: ReferenceGradients) -> None:
        self.truth, measured = truth, problem.network.measured
        self.squares = {name: torch.zeros_like(value) for name, value in measured.items()}
        self.along = {name: value.new_zeros(truth.batch.examples) for name, value in measured.items()}

    def emit(self, name: str, form: FactoredGradient) -> None:
        """Receive the gradients of a parameter."""
        self.along[name] = form.project(self.truth.directions[name])[0]
        if self.truth.gradients:
            self.squares[name] = form.sum_squares()

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
    constants = {value.untyped_storage().data_ptr() for value in network.constants.values()}
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
