"""Find the rescaling with the smallest Hessian trace, and rescale a network by it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
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
    values = {name: _flatten_values(diagonal[name]) for name in diagonal}
    summed = [_sum_over_positions(group, name, values[name]) for name in diagonal]
    none = np.zeros(0, dtype=np.int64)
    heads = np.concatenate([none, *(head for head, _, _ in summed)])
    tails = np.concatenate([none, *(tail for _, tail, _ in summed)])
    sums = np.concatenate([np.zeros(0), *(each for _, _, each in summed)])
    pairs = coo_array((sums, (heads, tails)), shape=(rows, rows)).tocsr()
    pairs.eliminate_zeros()
    heads, tails = np.repeat(np.arange(rows), np.diff(pairs.indptr)), pairs.indices.astype(np.int64)
    found = balance_forms(_compute_curvature_forms(group, heads, tails), pairs.data)
    # The factors of rows at the infimum, and whether they vanish against each other.
    logs, direction = (-2 * (group.forms @ each) for each in (found.potentials, found.recession_direction))
    layers, vanishing, factors = {}, {}, {}
    for name, value in values.items():
        head, tail = (getattr(group.members[name], end).reshape(-1) for end in ("head", "tail"))
        fades = direction[head] - direction[tail] < -0.5  # -1 at most, or 0
        share = np.where((value > 0) & ~fades, np.exp(np.where(fades, 0.0, logs[head] - logs[tail])), 0.0)
        layers[name], vanishing[name] = float(value @ share), int((fades & (value > 0)).sum())
        factors[name] = torch.from_numpy(share).to(diagonal[name].device)
    smallest = _make_smallest_trace(group, found, layers, {name: count for name, count in vanishing.items() if count})
    return replace(smallest, factors=factors)


def _sum_over_positions(
    group: Symmetries, name: str, values: Array
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Return the rows that a parameter leads to and from, and its values, summed over positions of a kernel."""
    head, tail = group.members[name].head, group.members[name].tail
    if head.ndim > 2:
        flat = [each.reshape(*head.shape[:2], -1) for each in (head, tail)]
        if all((each == each[:, :, :1]).all() for each in flat):
            head, tail = (each[:, :, 0] for each in flat)
            values = values.reshape(*head.shape, -1).sum(-1)
    return head.reshape(-1), tail.reshape(-1), values.reshape(-1)


def _flatten_values(values: Tensor) -> Array:
    found: Array = values.detach().double().cpu().numpy().reshape(-1)
    return found


def _compute_curvature_forms(group: Symmetries, heads: NDArray[np.int64], tails: NDArray[np.int64]) -> csr_array:
    # A factor of e^a divides the curvature by its square.
    rows = group.forms
    counts = np.diff(rows.indptr)
    if not len(heads) or counts.max(initial=0) > 1:
        forms: csr_array = -2.0 * (rows[heads] - rows[tails])
        return forms
    # Rows of one scale or none, as in most networks: the same, without intermediate matrices.
    scale, factor = np.zeros(len(counts), dtype=np.int64), np.zeros(len(counts))
    scale[counts > 0], factor[counts > 0] = rows.indices, rows.data
    columns = np.stack([scale[heads], scale[tails]], 1)
    entries = np.stack([-2 * factor[heads], 2 * factor[tails]], 1)
    equal = columns[:, 0] == columns[:, 1]
    entries[equal, 0] += entries[equal, 1]
    entries[equal, 1] = 0
    there = entries != 0
    starts = np.append(0, np.cumsum(there.sum(1)))
    made = csr_array((entries[there], columns[there], starts), shape=(len(heads), rows.shape[1]))
    made.sort_indices()
    made.has_canonical_format = True
    return made


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
