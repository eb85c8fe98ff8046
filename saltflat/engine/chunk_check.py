"""Check chunks of models that may reorder their examples: whether each example's outputs and gradients are its own.

The first examples, which strategies are compared on, need not reveal that a model reorders others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saltflat.engine.data import Batch
from saltflat.engine.per_example import Backward, NotBatchableError, make_leaves
from saltflat.engine.problem import Problem
from saltflat.engine.reference_gradients import compute_gradients, make_coupled_error
from saltflat.gradients.base import FactoredGradient

ROUNDING = 0.1  # of the tolerance of single examples: a chunk that is refused costs time, but is never wrong


def run_checked(
    problem: Problem, batch: Batch, run: Callable[[], tuple[Tensor, Backward]], tolerance: float
) -> tuple[Tensor, Backward]:
    """Run examples together, and check that the gradients that the strategy finds for each are its own.

    With a random weight for each example, the sum of their gradients is the gradient of the sum, which one plain
    backward pass computes. A gradient that is taken for another example's gets another weight.

    Args:
        problem: model, loss and data.
        batch: the examples.
        run: runs a strategy on the batch.
        tolerance: largest relative difference between outputs that counts as rounding.

    Raises:
        NotBatchableError: if gradients are taken for those of other examples.
        CoupledExamplesError: if outputs depend on other examples.
    """
    noise = torch.Generator().manual_seed(batch.first)
    weights = torch.randn(batch.examples, generator=noise, dtype=torch.float64)
    leaves = make_leaves(problem.network)
    outputs = problem.network(batch, leaves=leaves)
    column = torch.randn(outputs.shape, generator=noise, dtype=torch.float64)
    weighted = column * weights.reshape(-1, *(1,) * (outputs.dim() - 1))
    expected = compute_gradients(outputs, leaves, weighted.to(outputs))
    outputs = outputs.detach()
    problem.check_outputs(outputs, batch)
    _check_halves(problem, batch, outputs, torch.randperm(batch.examples, generator=noise), tolerance)
    del leaves
    found = {name: torch.zeros_like(value) for name, value in expected.items()}

    def emit(name: str, form: FactoredGradient) -> None:
        found[name] += form.sum_weighted(weights.to(found[name])[None])

    result, backward = run()
    backward(column.to(outputs)[None], emit, False)
    if not _is_same(found, expected, ROUNDING * tolerance):
        raise NotBatchableError("gradients are taken for those of other examples")
    return result, backward


def _check_halves(problem: Problem, batch: Batch, outputs: Tensor, order: Tensor, tolerance: float) -> None:
    """Check that examples have the same outputs among half of the others, in another order."""
    for half in order.chunk(2):
        with torch.no_grad():
            found = problem.network(batch.take(half, batch.first))
        own = outputs[half.to(outputs.device)]
        if found.shape != own.shape or not bool((found - own).abs().max() <= tolerance * outputs.abs().max()):
            raise make_coupled_error()


def _is_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> bool:
    """Return whether gradients are the same up to rounding, which is relative to the largest for tiny ones."""
    names = [name for name, value in expected.items() if value.numel()]
    off = torch.stack([(found[name] - expected[name]).abs().max().double() for name in names])
    size = torch.stack([expected[name].abs().max().double() for name in names])
    least = 100 * torch.finfo(expected[names[0]].dtype).eps * size.max()
    return bool((off <= torch.maximum(tolerance * size, least)).all())
