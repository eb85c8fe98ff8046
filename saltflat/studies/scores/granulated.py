"""Granulated Kendall correlation (Jiang et al., 2020), and means over groups of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from saltflat.studies.scores.correlation import make_indicator
from saltflat.studies.scores.layout import (
    Counts,
    Floats,
    GridLayout,
    Ints,
    Setting,
    check_paired_values,
    combine_codes,
    divide_or_nan,
    iter_blocks,
    make_unit_counts,
)

# Pairs of runs that are compared, and pairs of configurations that are resampled. A thousand runs have fewer of both.
MAX_PAIRS = 5_000_000
MAX_RESAMPLED = 500_000
# Pairs times resamples in memory at a time: 4 MB.
BLOCK = 500_000


def compute_sample_share(by_axis: Iterable[tuple[Ints, Ints]]) -> float:
    """Return the share of pairs of the same group and different codes to use: 1 unless there are too many."""
    whole = sum(count_pairs_within(groups, codes) for groups, codes in by_axis)
    return min(1.0, MAX_PAIRS / max(1, whole))


def count_pairs_within(groups: Ints, codes: Ints) -> int:
    """Return how many pairs of runs have the same group and different codes."""
    same, both = np.bincount(groups), np.bincount(combine_codes([groups, codes], len(groups)))
    return int((same**2).sum() - (both**2).sum()) // 2


def find_pairs_within(groups: Ints, codes: Ints, share: float, seed: int) -> tuple[Ints, Ints]:
    """Return all pairs of runs of the same group and different codes, or a random share of them."""
    order = np.argsort(groups, kind="stable").astype(np.int64)
    group, code, draw = groups[order], codes[order], np.random.default_rng([seed, 1])
    first, second = [order[:0]], [order[:0]]
    for step in range(1, int(np.bincount(group).max(initial=0))):
        taken = (group[step:] == group[:-step]) & (code[step:] != code[:-step])
        if share < 1:
            taken &= draw.random(len(taken)) < share
        found = np.flatnonzero(taken)
        first.append(order[found])
        second.append(order[found + step])
    return np.concatenate(first), np.concatenate(second)


class PairMeans:
    """Compute how often a measure and the gap order pairs of runs alike minus how often they disagree: the weighted
    mean over the pairs of each group, and the mean of these over the groups.

    Pairs of the same two configurations are drawn together and count as one. If there are too many of these to
    resample, a random subset is used, and its resamples are shifted by the subset's own error. A subset can only
    increase the spread, so no interval becomes narrower.

    Attributes:
        share: the share of all pairs of runs that is used.
        groups: the number of groups.
        whole: the number of pairs of configurations.
        resampled: how many of these are resampled.
    """

    def __init__(
        self,
        first: Ints,
        second: Ints,
        group: Ints,
        weight: Floats,
        y: Floats,
        units: Ints,
        *,
        share: float,
        seed: int,
    ) -> None:
        self.share = share
        self._first, self._second, self._group, self._weight = first, second, group, weight
        self._y = np.sign(y[first] - y[second]).astype(np.int8)
        self.groups = int(group.max(initial=-1)) + 1
        one, other = units[first], units[second]
        # Numbered group by group.
        self._bundle = combine_codes([group, np.minimum(one, other), np.maximum(one, other)], len(one))
        example = np.unique(self._bundle, return_index=True)[1]
        self.whole = len(example)
        self._chosen = np.arange(self.whole)
        if self.whole > MAX_RESAMPLED:
            self._chosen = np.sort(np.random.default_rng([seed, 2]).permutation(self.whole)[:MAX_RESAMPLED])
        self.resampled = len(self._chosen)
        example = example[self._chosen]
        sizes = np.bincount(group[example], minlength=self.groups)
        self._alone = sizes[group[example]] == 1
        weights = np.bincount(self._bundle, weight, self.whole)[self._chosen]
        self._bundles = [
            kind(
                first[example[some]],
                second[example[some]],
                combine_codes([group[example[some]]], some.sum()),
                weights[some],
            )
            for kind, some in ((SinglePairBundles, self._alone), (PairBundles, ~self._alone))
        ]

    def compute_group_means(self, x: Floats) -> Floats:
        """Return the mean of each group, for one measure."""
        sums = np.bincount(self._group, self._compute_agreement(x), self.groups)
        return sums / np.bincount(self._group, self._weight, self.groups)

    def resample(self, x: Floats, times: Counts) -> Floats:
        """Return ``(measures, resamples)``: the mean over the groups of which a pair was drawn; nan if there is none.
        x is ``(measures, runs)``."""
        sums = np.zeros((len(x), self.resampled))
        for place, each in enumerate(x):
            sums[place] = np.bincount(self._bundle, self._compute_agreement(each), self.whole)[self._chosen]
        found = np.concatenate([self._resample_block(sums, block) for block in iter_blocks(times)], axis=1)
        if self.resampled < self.whole:
            exact = np.array([self.compute_group_means(each).mean() for each in x])
            found[:, 1:] += exact[:, None] - found[:, :1]
            found[:, 0] = exact
        return found

    def _resample_block(self, sums: Floats, times: Counts) -> Floats:
        total, groups = np.zeros((len(sums), times.shape[1])), np.zeros(times.shape[1])
        for bundles, some in zip(self._bundles, (self._alone, ~self._alone), strict=True):
            bundles.add_means(sums[:, some], times.astype(np.float64), total, groups)
        return divide_or_nan(total, groups)

    def _compute_agreement(self, x: Floats) -> Floats:
        return self._weight * (np.sign(x[self._first] - x[self._second]) * self._y)


@dataclass(frozen=True)
class PairBundles:
    """Pairs of the same two configurations and group, as one representative and the weight of all; sorted by group."""

    first: Ints
    second: Ints
    group: Ints
    weight: Floats

    def add_means(self, sums: Floats, times: Floats, total: Floats, groups: Floats) -> None:
        """Add up the means of the groups in each resample, and count the groups that have one.

        Args:
            sums: ``(measures, bundles)``, the weighted sum in each bundle.
            times: ``(runs, resamples)``.
            total: ``(measures, resamples)``, incremented in place.
            groups: ``(resamples,)``, incremented in place.
        """
        for some in self._iter_slices(max(1, BLOCK // times.shape[1])):
            drawn = np.take(times, self.first[some], 0) * np.take(times, self.second[some], 0)
            group = self.group[some] - self.group[some.start]
            weight = make_indicator(group, int(group[-1]) + 1) @ (self.weight[some, None] * drawn)
            groups += (weight > 0).sum(0)
            # After this division, one matrix product sums over the groups for all measures.
            drawn *= np.divide(1.0, weight, out=np.zeros_like(weight), where=weight > 0)[group]
            total += sums[:, some] @ drawn

    def _iter_slices(self, size: int) -> Iterator[slice]:
        """Yield slices of about ``size`` bundles that do not split a group."""
        ends = np.flatnonzero(np.diff(self.group, append=-1)) + 1
        start = 0
        while start < len(self.group):
            after = np.searchsorted(ends, start, "right")
            stop = int(ends[max(after, np.searchsorted(ends, start + size, "right") - 1)])
            yield slice(start, stop)
            start = stop


class SinglePairBundles(PairBundles):
    """Bundles that are the only one of their group, whose mean is thus the same in all resamples that contain it."""

    def add_means(self, sums: Floats, times: Floats, total: Floats, groups: Floats) -> None:
        """Add up the means of the groups in each resample, and count the groups that have one."""
        there, shape = (times > 0).astype(np.float64), (len(times), len(times))
        for values, found in zip((*(sums / self.weight), np.ones(len(self.first))), (*total, groups), strict=True):
            with_others = csr_array((values, (self.first, self.second)), shape=shape) @ there
            found += np.einsum("ar,ar->r", there, with_others)


@dataclass(frozen=True)
class GranulatedKendall:
    """The mean over the axes, and each axis; nan if no two runs differ in that axis alone."""

    mean: float
    by_axis: dict[str, float]


def granulated_kendall(
    x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[Setting]], seeds: Sequence[Setting] | None = None
) -> GranulatedKendall:
    r"""Return Kendall's tau along each axis with all other settings fixed, and its mean over the axes, from -1 to 1.

    .. math::
        \psi_i = \operatorname{mean}_{\text{settings of the other axes and the seed}} \tau_a, \qquad
        \Psi = \operatorname{mean}_i \psi_i

    :math:`\tau_a` is taken over the runs that differ in axis :math:`i` alone. A setting with fewer than two such runs
    is left out. A measure that depends on one axis only gets no more than that axis' share.

    Args:
        x: the measure, one number per run.
        y: the gap, one number per run.
        axes: the setting of each run, by axis.
        seeds: the seed of each run; only runs with the same seed are compared.

    Example:
        >>> found = granulated_kendall([1, 1, 2, 2], [1, 2, 3, 4], {"lr": [1, 1, 2, 2], "batch": [8, 16, 8, 16]})
        >>> found.by_axis, found.mean
        ({'lr': 1.0, 'batch': 0.0}, 0.5)
    """
    values, gaps = check_paired_values(x, y)
    count = len(values)
    along = build_axis_means(gaps, GridLayout.from_settings(axes, seeds, count), np.arange(count), 0)
    found = {name: each.resample(values[None], make_unit_counts(count))[0] for name, each in along.items()}
    by_axis = {name: float(each[0]) for name, each in found.items()}
    return GranulatedKendall(float(average_axes(found, 1)[0]), by_axis)


def build_axis_means(y: Floats, layout: GridLayout, units: Ints, seed: int) -> dict[str, PairMeans]:
    """Return, for each axis, the pairs that differ in it alone, grouped by the setting of all others."""
    found = {}
    for name, codes in layout.axes.items():
        others = [each for other, each in layout.axes.items() if other != name]
        setting = combine_codes([*others, layout.seeds], len(codes))
        share = compute_sample_share([(setting, codes)])
        first, second = find_pairs_within(setting, codes, share, seed)
        group = combine_codes([setting[first]], len(first))
        found[name] = PairMeans(first, second, group, np.ones(len(first)), y, units, share=share, seed=seed)
    return found


def average_axes(by_axis: Mapping[str, Floats], resamples: int) -> Floats:
    """Return the mean over the axes that have a value."""
    each = np.stack(list(by_axis.values())) if by_axis else np.full((1, resamples), np.nan)
    known = ~np.isnan(each)
    return divide_or_nan(np.where(known, each, 0.0).sum(0), known.sum(0))
