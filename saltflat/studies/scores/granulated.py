"""Granulated Kendall (Jiang et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from saltflat.studies.scores.arrays import Floats, Ints, once, paired, ratio
from saltflat.studies.scores.layout import Layout, joined, pair_draws


@dataclass(frozen=True)
class Granulated:
    """The mean over the axes, and each axis; nan where no two runs differ in that axis alone."""

    mean: float
    by_axis: dict[str, float]


@dataclass(frozen=True)
class AxisPairs:
    """Pairs of runs that differ in one axis and in nothing else, by the setting of all the others."""

    first: Ints
    second: Ints
    group: Ints


def granulated_kendall(
    x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[object]], seeds: Sequence[object] | None = None
) -> Granulated:
    r"""Whether the measure follows the gap when one setting changes and all others stay, from -1 to 1.

    .. math::
        \psi_i = \operatorname{mean}_{\text{settings of the other axes and the seed}} \tau_a, \qquad
        \Psi = \operatorname{mean}_i \psi_i

    :math:`\tau_a` is taken over the runs that differ in axis :math:`i` alone. A setting with fewer than two such runs
    is left out. A measure that only knows one axis gets no more than that axis' share.

    Args:
        x: of the measure, a number per run.
        y: of the gap.
        axes: by name, the setting of each run.
        seeds: of each run; only runs with the same seed are compared.

    Example:
        >>> found = granulated_kendall([1, 1, 2, 2], [1, 2, 3, 4], {"lr": [1, 1, 2, 2], "batch": [8, 16, 8, 16]})
        >>> found.by_axis, found.mean
        ({'lr': 1.0, 'batch': 0.0}, 0.5)
    """
    values, gaps = paired(x, y)
    found = drawn_granulated(values, gaps, axis_pairs(Layout.of(axes, seeds, len(values))), once(len(values)))
    by_axis = {name: float(each[0]) for name, each in found.items()}
    return Granulated(float(over_axes(found, 1)[0]), by_axis)


def axis_pairs(layout: Layout) -> dict[str, AxisPairs]:
    """For each axis the pairs that differ in it alone."""
    found = {}
    for name, codes in layout.axes.items():
        others = [each for other, each in layout.axes.items() if other != name]
        group = joined([*others, layout.seeds], len(codes))
        first, second = (
            np.concatenate(each) if each else np.zeros(0, dtype=np.int64) for each in _within(group, codes)
        )
        found[name] = AxisPairs(first, second, np.unique(group[first], return_inverse=True)[1].astype(np.int64))
    return found


def drawn_granulated(x: Floats, y: Floats, pairs: Mapping[str, AxisPairs], draws: Floats) -> dict[str, Floats]:
    """Each axis in each resample; a setting of which fewer than two runs were drawn is left out of that one."""
    return {name: _along(x, y, each, draws) for name, each in pairs.items()}


def over_axes(by_axis: Mapping[str, Floats], resamples: int) -> Floats:
    """The mean over the axes that have a value."""
    each = np.stack(list(by_axis.values())) if by_axis else np.full((1, resamples), np.nan)
    known = ~np.isnan(each)
    return ratio(np.where(known, each, 0.0).sum(0), known.sum(0))


def _along(x: Floats, y: Floats, pairs: AxisPairs, draws: Floats) -> Floats:
    kind, count = pair_draws(draws, pairs.first, pairs.second)
    agree = np.sign(x[pairs.first] - x[pairs.second]) * np.sign(y[pairs.first] - y[pairs.second])
    shape = (int(pairs.group.max(initial=-1)) + 1, len(count))
    total = np.asarray(csr_array((np.ones(len(kind)), (pairs.group, kind)), shape=shape) @ count)
    alike = np.asarray(csr_array((agree, (pairs.group, kind)), shape=shape) @ count)
    taken = total > 0
    return ratio((np.where(taken, alike, 0.0) / np.where(taken, total, 1.0)).sum(0), taken.sum(0))


def _within(group: Ints, codes: Ints) -> tuple[list[Ints], list[Ints]]:
    """Pairs of the same group and different codes."""
    order = np.argsort(group, kind="stable")
    first, second = [], []
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        a, b = np.triu_indices(len(members), 1)
        differ = codes[members[a]] != codes[members[b]]
        first.append(members[a][differ].astype(np.int64))
        second.append(members[b][differ].astype(np.int64))
    return first, second
