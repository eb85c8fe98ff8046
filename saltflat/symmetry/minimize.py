"""The rescaling with the smallest Hessian trace, and the network rescaled by it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from saltflat.balance.exponentials import FormBalanceResult, balance_forms
from saltflat.engine.progress import Progress
from saltflat.engine.session import take_turns
from saltflat.errors import ModelError
from saltflat.statistics.compute import compute_statistics
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Array, Symmetries, check_rescaling_kind
from saltflat.symmetry.rescale import apply_rescaling, check_same_function
from saltflat.symmetry.tracing.run import take_example
from saltflat.validation import check_flag


@dataclass(frozen=True)
class SmallestTrace:
    """The smallest trace, and the sizes of units that reach it.

    Attributes:
        value: the infimum.
        logs: logarithms of the scales that reach it.
        layers: each parameter's trace there.
        factors: what the curvature of every entry is multiplied by there, by parameter; empty for factors of layers.
        lost: parameters with entries whose curvature can be scaled away, and how many.
        absorbed: BatchNorms that let some of it vanish.
        attained: whether finite scales reach the value.
        residual: of the solver.
        converged: whether it finished.
        notes: what a reader should know.
    """

    value: float
    logs: Array
    layers: Mapping[str, float]
    lost: Mapping[str, int]
    absorbed: tuple[str, ...]
    attained: bool
    residual: float
    converged: bool
    notes: tuple[str, ...]
    factors: Mapping[str, Tensor] = field(default_factory=dict)


def minimize_trace_by_layer(group: Symmetries, traces: Mapping[str, float]) -> SmallestTrace:
    """With one factor per parameter, from the parameters' traces."""
    names = [name for name in traces if group.members[name].head.size]
    heads, tails = (
        np.array([getattr(group.members[name], end).reshape(-1)[0] for name in names], dtype=np.int64)
        for end in ("head", "tail")
    )
    weights = np.array([traces[name] for name in names], dtype=np.float64)
    found = balance_forms(_compute_curvature_forms(group, heads, tails), weights)
    layers = dict(zip(names, found.terms.tolist(), strict=True))
    lost = {name: 1 for name, gone in zip(names, found.lost, strict=True) if gone}
    return _make_smallest_trace(group, found, layers, lost)


def minimize_trace_by_unit(group: Symmetries, diagonal: Mapping[str, Tensor]) -> SmallestTrace:
    """With a size for every unit, from the curvature of every entry."""
    # Entries between the same two units are multiplied alike: only their sum matters.
    rows = group.forms.shape[0]
    keys = {name: _compute_pair_keys(group, name, rows) for name in diagonal}
    each = [np.unique(key, return_inverse=True) for key in keys.values()]
    pairs = np.unique(np.concatenate([different for different, _ in each])) if each else np.array([], dtype=np.int64)
    weights = np.zeros(len(pairs))
    # Which of all pairs each parameter's entries belong to.
    places = {name: np.searchsorted(pairs, found)[inverse] for name, (found, inverse) in zip(keys, each, strict=True)}
    values = {name: _flatten_values(diagonal[name]) for name in diagonal}
    for name, place in places.items():
        weights += np.bincount(place, values[name], minlength=len(pairs))
    found = balance_forms(_compute_curvature_forms(group, pairs // rows, pairs % rows), weights)
    share = np.divide(found.terms, weights, out=np.zeros_like(weights), where=weights > 0)
    layers = {name: float((values[name] * share[place]).sum()) for name, place in places.items()}
    gone = {name: int((found.lost[place] & (values[name] > 0)).sum()) for name, place in places.items()}
    factors = {name: torch.from_numpy(share[place]).to(diagonal[name].device) for name, place in places.items()}
    smallest = _make_smallest_trace(group, found, layers, {name: count for name, count in gone.items() if count})
    return replace(smallest, factors=factors)


def _compute_pair_keys(group: Symmetries, name: str, rows: int) -> NDArray[np.int64]:
    member = group.members[name]
    return (member.head.astype(np.int64) * rows + member.tail).reshape(-1)


def _flatten_values(values: Tensor) -> Array:
    found: Array = values.detach().double().cpu().numpy().reshape(-1)
    return found


def _compute_curvature_forms(group: Symmetries, heads: NDArray[np.int64], tails: NDArray[np.int64]):  # type: ignore[no-untyped-def]
    # A factor of e^a divides the curvature by its square.
    return -2.0 * (group.forms[heads] - group.forms[tails])


def _make_smallest_trace(
    group: Symmetries, found: FormBalanceResult, layers: dict[str, float], lost: dict[str, int]
) -> SmallestTrace:
    absorbed = _find_absorbing_norms(group, found.drift) if lost else ()
    return SmallestTrace(
        value=found.value,
        logs=found.potentials,
        layers=layers,
        lost=lost,
        absorbed=absorbed,
        attained=found.attained,
        residual=found.residual,
        converged=found.converged,
        notes=(*_explain_infimum(group, lost, absorbed), *([] if found.converged else found.notes)),
    )


def _find_absorbing_norms(group: Symmetries, drift: Array) -> tuple[str, ...]:
    moved = group.compute_factor_logs(drift)
    return tuple(
        name.rpartition(".")[0]
        for name, each in group.members.items()
        if each.kind == "variance" and np.any(np.abs(moved[name]) > 1e-9)
    )


def _explain_infimum(group: Symmetries, lost: Mapping[str, int], absorbed: tuple[str, ...]) -> tuple[str, ...]:
    if not group.scales:
        return (
            "no rescaling of the measured parameters leaves the network's function alone: this is the Hessian trace",
        )
    if not lost:
        return ()
    if absorbed:
        return (
            f"the curvature of {_format_some_names(lost)} can be scaled away, since the running statistics of "
            f"{_format_some_names(absorbed)} absorb any scale: no finite factors reach the infimum. Measure "
            "saltflat.fold(model) instead.",
        )
    return (
        f"the curvature of {_format_some_names(lost)} can be scaled away, since nothing on the other side of these "
        "units "
        "has any (units that are dead, weights of exactly zero, normalisations that undo any scale): no finite "
        "factors reach "
        "the infimum",
    )


def _format_some_names(names: Mapping[str, int] | tuple[str, ...]) -> str:
    every = list(names)
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")


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
            "Expected a loss that does not bend downwards, but got negative curvature: the trace has no minimum "
            "over scales. Try using cross_entropy, mse or another convex loss."
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
