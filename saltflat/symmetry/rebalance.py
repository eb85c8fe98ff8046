"""The same function with the smallest Hessian trace."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from saltflat.amounts import check_flag
from saltflat.errors import ModelError
from saltflat.progress import Progress
from saltflat.sweep import compute_statistics
from saltflat.symmetry.example import take_example
from saltflat.symmetry.graph import find_symmetries
from saltflat.symmetry.group import check_rescaling_kind
from saltflat.symmetry.rescale import apply_rescaling, check_same_function
from saltflat.symmetry.smallest import minimize_trace_by_layer, minimize_trace_by_unit
from saltflat.turns import take_turns


@take_turns
def rebalance(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    kind: str = "unit",
    *,
    columns: str = "exact",
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
    strict: bool = True,
) -> nn.Module:
    """A new model with the same function, rescaled so that its Hessian has the smallest trace.

    Args:
        model: any module; it is left as it is.
        data: as for :func:`saltflat.measure`.
        loss: the same.
        kind: ``"unit"`` for a size of every unit, ``"layer"`` for one factor per parameter.
        columns: how the loss's curvature is taken.
        memory: working memory.
        dtype: precision to measure in; the model's own if None.
        seed: of random columns.
        progress: True or False for a progress bar, or a function of ``(done, total)``.
        strict: whether to check, in float64 and on a few examples, that the function is the same.

    Example:
        >>> from saltflat import measure
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> data = torch.randn(20, 2), torch.randint(3, (20,))
        >>> names = ["hessian_trace", "minimum_unit_sharpness"]
        >>> before, after = (measure(m, data, measures=names) for m in (net, rebalance(net, data)))
        >>> round(after["hessian_trace"].value / before["minimum_unit_sharpness"].value, 4)
        1.0
    """
    check_rescaling_kind(kind)
    check_flag(strict=strict)
    example = take_example(data)
    name = "curvature_diagonal" if kind == "unit" else "curvature_trace"
    found = compute_statistics(
        model, data, [name], loss, columns=columns, memory=memory, dtype=dtype, seed=seed, progress=progress
    )[name]
    if any(bool((values < 0).any()) for values in found.values()):
        raise ModelError(
            "Got negative curvature: the trace has no minimum over scales. Want a loss that does not bend downwards. "
            "Do: use cross_entropy, mse or another convex loss."
        )
    group = find_symmetries(model, example).restrict_to_parameters(found)
    if kind == "unit":
        best = minimize_trace_by_unit(group, found)
    else:
        group = group.restrict_to_layers()
        best = minimize_trace_by_layer(group, {each: float(trace) for each, trace in found.items()})
    if best.absorbed:
        raise ModelError(f"Got a model without a rescaling of smallest trace: {best.notes[0]} Do: fold it first.")
    if best.lost:
        # What could be scaled away without end is left where it is.
        warnings.warn(f"The trace could be made smaller without end: {best.notes[0]}.", stacklevel=3)
    if not best.converged:
        warnings.warn(f"The trace may not be the smallest: {best.notes[-1]}", stacklevel=3)
    if strict:
        check_same_function(model, group, best.logs, example)
    return apply_rescaling(model, group, best.logs)
