"""Find the rescaling with the smallest Hessian trace, and rescale a network by it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor, nn

from saltflat.balance.exponentials import FormBalanceResult, balance_forms
from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike
from saltflat.engine.progress import Progress
from saltflat.errors import ModelError
from saltflat.statistics.compute import compute_statistics
from saltflat.symmetry.equality import take_example
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Array, RescalingKind, Symmetries, check_rescaling_kind
from saltflat.symmetry.rescale import apply_rescaling, check_same_function
from saltflat.validation import check_flag, take_turns


@dataclass(frozen=True)
class SmallestTrace:
    """The smallest trace under rescaling, and the scales that attain it.

    Attributes:
        value: the infimum.
        logs: logarithms of the scales that attain it.
        layers: trace of each parameter at the infimum.
        vanishing: number of entries whose curvature can be scaled away, by parameter; only parameters that have some.
        absorbing_norms: BatchNorms whose running statistics absorb scales and let curvature vanish.
        attained: whether finite scales attain the value.
        residual: residual of the solver.
        converged: whether the solver converged.
        notes: further remarks for the reader.
        factors: factor of the curvature of every entry at the infimum, by parameter; empty for rescalings by layer.
    """

    value: float
    logs: Array
    layers: Mapping[str, float]
    vanishing: Mapping[str, int]
    absorbing_norms: tuple[str, ...]
    attained: bool
    residual: float
    converged: bool
    notes: tuple[str, ...]
    factors: Mapping[str, Tensor] = field(default_factory=dict)


def minimize_trace_by_layer(group: Symmetries, traces: Mapping[str, float]) -> SmallestTrace:
    """Minimize the trace over one factor per parameter, given the trace of each parameter."""
    names = [name for name in traces if group.members[name].head.size]
    heads, tails = (
        np.array([getattr(group.members[name], end).reshape(-1)[0] for name in names], dtype=np.int64)
        for end in ("head", "tail")
    )
    weights = np.array([traces[name] for name in names], dtype=np.float64)
    found = balance_forms(_compute_curvature_forms(group, heads, tails), weights)
    layers = dict(zip(names, found.terms.tolist(), strict=True))
    vanishing = {name: 1 for name, vanishes in zip(names, found.vanishing, strict=True) if vanishes}
    return _make_smallest_trace(group, found, layers, vanishing)


def minimize_trace_by_unit(group: Symmetries, diagonal: Mapping[str, Tensor]) -> SmallestTrace:
    """Minimize the trace over one scale per unit, given the curvature of every entry."""
    # Entries between the same two units have the same factor: only their sum matters.
    rows = group.forms.shape[0]
    keys = {name: _compute_pair_keys(group, name, rows) for name in diagonal}
    each = [np.unique(key, return_inverse=True) for key in keys.values()]
    pairs = np.unique(np.concatenate([different for different, _ in each])) if each else np.array([], dtype=np.int64)
    weights = np.zeros(len(pairs))
    # The index of the pair that each entry belongs to.
    places = {name: np.searchsorted(pairs, found)[inverse] for name, (found, inverse) in zip(keys, each, strict=True)}
    values = {name: _flatten_values(diagonal[name]) for name in diagonal}
    for name, place in places.items():
        weights += np.bincount(place, values[name], minlength=len(pairs))
    found = balance_forms(_compute_curvature_forms(group, pairs // rows, pairs % rows), weights)
    share = np.divide(found.terms, weights, out=np.zeros_like(weights), where=weights > 0)
    layers = {name: float((values[name] * share[place]).sum()) for name, place in places.items()}
    vanishing = {name: int((found.vanishing[place] & (values[name] > 0)).sum()) for name, place in places.items()}
    factors = {name: torch.from_numpy(share[place]).to(diagonal[name].device) for name, place in places.items()}
    smallest = _make_smallest_trace(group, found, layers, {name: count for name, count in vanishing.items() if count})
    return replace(smallest, factors=factors)


def _compute_pair_keys(group: Symmetries, name: str, rows: int) -> NDArray[np.int64]:
    member = group.members[name]
    return (member.head.astype(np.int64) * rows + member.tail).reshape(-1)


def _flatten_values(values: Tensor) -> Array:
    found: Array = values.detach().double().cpu().numpy().reshape(-1)
    return found


def _compute_curvature_forms(group: Symmetries, heads: NDArray[np.int64], tails: NDArray[np.int64]) -> csr_array:
    # A factor of e^a divides the curvature by its square.
    forms: csr_array = -2.0 * (group.forms[heads] - group.forms[tails])
    return forms


def _make_smallest_trace(
    group: Symmetries, found: FormBalanceResult, layers: dict[str, float], vanishing: dict[str, int]
) -> SmallestTrace:
    absorbing_norms = _find_absorbing_norms(group, found.recession_direction) if vanishing else ()
    return SmallestTrace(
        value=found.value,
        logs=found.potentials,
        layers=layers,
        vanishing=vanishing,
        absorbing_norms=absorbing_norms,
        attained=found.attained,
        residual=found.residual,
        converged=found.converged,
        notes=(*_explain_infimum(group, vanishing, absorbing_norms), *([] if found.converged else found.notes)),
    )


def _find_absorbing_norms(group: Symmetries, direction: Array) -> tuple[str, ...]:
    moved = group.compute_factor_logs(direction)
    return tuple(
        name.rpartition(".")[0]
        for name, each in group.members.items()
        if each.kind == "variance" and np.any(np.abs(moved[name]) > 1e-9)
    )


def _explain_infimum(
    group: Symmetries, vanishing: Mapping[str, int], absorbing_norms: tuple[str, ...]
) -> tuple[str, ...]:
    if not group.scales:
        return (
            "no rescaling of the measured parameters leaves the network's function unchanged: this is the Hessian "
            "trace",
        )
    if not vanishing:
        return ()
    if absorbing_norms:
        return (
            f"the curvature of {_format_some_names(vanishing)} can be scaled away, since the running statistics of "
            f"{_format_some_names(absorbing_norms)} absorb any scale: no finite factors attain the infimum. Measure "
            "saltflat.fold(model) instead.",
        )
    return (
        f"the curvature of {_format_some_names(vanishing)} can be scaled away, since weights on the other side of "
        "these units have no curvature (dead units, weights of exactly zero, normalizations that undo any scale): no "
        "finite factors attain the infimum",
    )


def _format_some_names(names: Mapping[str, int] | tuple[str, ...]) -> str:
    every = list(names)
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")


@take_turns
def rebalance(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    *,
    kind: RescalingKind = "unit",
    columns: str = "exact",
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
    strict: bool = True,
) -> nn.Module:
    """Return a new model with the same function, rescaled such that its Hessian has the smallest trace.

    Args:
        model: any module; it is not modified.
        data: as for :func:`saltflat.measure`.
        loss: as for :func:`saltflat.measure`.
        kind: ``"unit"`` for one scale per unit, ``"layer"`` for one factor per parameter.
        columns: as for :func:`saltflat.measure`.
        memory: working memory beyond the model and the results.
        dtype: precision of the computation; that of the model if None.
        seed: seed of random columns.
        progress: True or False for a progress bar, or a function of ``(step, done, total)``.
        strict: whether to check in float64 on a few examples that the function is unchanged.

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
        model, data, names=[name], loss=loss, columns=columns, memory=memory, dtype=dtype, seed=seed, progress=progress
    )[name]
    if any(bool((values < 0).any()) for values in found.values()):
        raise ModelError(
            "Expected a convex loss, but got negative curvature, for which the trace has no minimum over scales. Try "
            "using cross_entropy or mse."
        )
    group = find_symmetries(model, example).restrict_to_parameters(found)
    if kind == "unit":
        best = minimize_trace_by_unit(group, found)
    else:
        group = group.restrict_to_layers()
        best = minimize_trace_by_layer(group, {each: float(trace) for each, trace in found.items()})
    if best.absorbing_norms:
        raise ModelError(
            f"Expected a model with a rescaling of smallest trace, but got one without: {best.notes[0]} Try "
            "saltflat.rebalance(saltflat.fold(model), data)."
        )
    if best.vanishing:
        # Vanishing terms are left at finite scales.
        warnings.warn(f"The trace can be made smaller without bound: {best.notes[0]}.", stacklevel=3)
    if not best.converged:
        warnings.warn(f"The trace may not be the smallest: {best.notes[-1]}", stacklevel=3)
    if strict:
        check_same_function(model, group, best.logs, example)
    return apply_rescaling(model, group, best.logs)
