"""The rescaling with the smallest Hessian trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saltflat.balance.forms import FormBalanceResult, balance_forms
from saltflat.symmetry.group import Array, Symmetries


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
