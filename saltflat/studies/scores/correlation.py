"""Pearson's, Spearman's and Kendall's correlations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from saltflat.studies.scores.layout import (
    Counts,
    Floats,
    Ints,
    check_paired_values,
    combine_codes,
    divide_or_nan,
    iter_blocks,
    make_unit_counts,
)

# The variance that rounding leaves in a resample of equal values, if all values span about one.
ROUNDING = (4 * np.finfo(np.float64).eps) ** 2
# A variance is computed from moments up to this many times larger than itself: two digits are lost.
CANCELLATION = 100.0


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    r"""Return Pearson's correlation: how nearly the points lie on a straight line, from -1 to 1.

    .. math::
        r = \frac{\sum (x - \bar x)(y - \bar y)}{\sqrt{\sum (x - \bar x)^2 \sum (y - \bar y)^2}}

    A single outlier can dominate it. nan if all x or all y are equal.

    Example:
        >>> round(pearson([1, 2, 3], [10, 20, 40]), 3)
        0.982
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_pearson(values[None], gaps, make_unit_counts(len(values)))[0, 0])


def resample_pearson(x: Floats, y: Floats, times: Counts) -> Floats:
    """Return Pearson's correlation of each resample, ``(measures, resamples)``; x is ``(measures, runs)``."""
    if not len(y):
        return np.full((len(x), times.shape[1]), np.nan)
    x, y = np.stack([_scale_values(each) for each in x]), _scale_values(y)
    sums = np.concatenate([x, x * x, x * y, y[None], (y * y)[None], np.ones((1, len(y)))])
    return np.concatenate(
        [_compute_pearson_block(x, y, sums, block.astype(np.float64)) for block in iter_blocks(times)], axis=1
    )


def _compute_pearson_block(x: Floats, y: Floats, sums: Floats, times: Floats) -> Floats:
    *parts, my, yy, total = np.split(sums @ times, [len(x), 2 * len(x), 3 * len(x), 3 * len(x) + 1, 3 * len(x) + 2])
    mx, xx, xy, my, yy = (divide_or_nan(each, total) for each in (*parts, my, yy))
    xx, yy, xy = xx - mx * mx, yy - my * my, xy - mx * my
    found = _compute_correlation(xx, yy, xy)
    # If a resample lacks the runs that make up most of the spread, differences of moments are mostly rounding.
    lossy = ~((CANCELLATION * xx > mx * mx) & (CANCELLATION * yy > my * my))
    for measure in np.flatnonzero(lossy.any(1)):
        again = np.flatnonzero(lossy[measure])
        found[measure, again] = _compute_two_pass_pearson(x[measure, :, None], y[:, None], times[:, again])
    return found


def _compute_two_pass_pearson(x: Floats, y: Floats, times: Floats) -> Floats:
    total = times.sum(0)
    dx, dy = x - divide_or_nan((times * x).sum(0), total), y - divide_or_nan((times * y).sum(0), total)
    return _compute_correlation(*(divide_or_nan((times * each).sum(0), total) for each in (dx * dx, dy * dy, dx * dy)))


def _compute_correlation(xx: Floats, yy: Floats, xy: Floats) -> Floats:
    known = (xx > ROUNDING) & (yy > ROUNDING)
    norms = np.sqrt(np.where(known, xx, 0.0)) * np.sqrt(np.where(known, yy, 0.0))
    return np.clip(divide_or_nan(np.where(known, xy, 0.0), norms), -1, 1)


def _scale_values(x: Floats) -> Floats:
    """Center and scale values to at most one, so that squares of very large or small floats do not overflow."""
    if not len(x) or x.min() == x.max():
        return np.zeros_like(x)
    x = x / np.abs(x).max()
    x = x - x.mean()
    return np.asarray(x / np.abs(x).max())


Numbers = TypeVar("Numbers", Floats, Counts)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return Spearman's correlation, Pearson's correlation of the ranks: how nearly monotone, from -1 to 1.

    Equal values share the mean of their ranks. nan if all x or all y are equal.

    Example:
        >>> round(spearman([1, 2, 3, 4], [1, 8, 27, 64]), 12)
        1.0
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_spearman(values, gaps, make_unit_counts(len(values)))[0])


class Ranking:
    """Group runs by equal values, the smallest first.

    Attributes:
        place: the group of each run.
        total: a sparse matrix that sums over each group.
    """

    def __init__(self, values: Floats | Ints) -> None:
        self.place: Ints = np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
        self.total = make_indicator(self.place, int(self.place.max(initial=-1)) + 1)

    @property
    def has_ties(self) -> bool:
        """Return whether any two runs have equal values."""
        return self.total.shape[0] < len(self.place)


def make_indicator(codes: Ints, number: int) -> csr_array:
    """Return a matrix that sums the rows of each code: ``(codes, runs)``."""
    runs = len(codes)
    return csr_array((np.ones(runs, dtype=np.float32), (codes, np.arange(runs))), shape=(number, runs))


def compute_running_sum(x: Numbers) -> Numbers:
    """Return ``np.cumsum(x, axis=0)``, several times faster for long rows."""
    size = max(1, math.isqrt(len(x)))
    whole = len(x) // size * size
    found = x.copy()
    parts = found[:whole].reshape(-1, size, x.shape[1])
    for k in range(1, size):
        parts[:, k] += parts[:, k - 1]
    for k in range(1, len(parts)):
        parts[k] += parts[k - 1, -1]
    for k in range(max(whole, 1), len(x)):
        found[k] += found[k - 1]
    return found


def resample_spearman(x: Floats, y: Floats, times: Counts) -> Floats:
    """Return Spearman's correlation of each resample, ranked anew; copies of a run are ties.

    Twice the rank of a run in a resample of size N, counted from the middle of the first, is 2 b + e with b copies
    below and e equal to it. Its mean is N and its variance (N^3 - sum e^3) / 3 N, the sum over groups of equal values.
    All sums are of whole numbers below 2^53, thus exact and the same for every order of the runs.
    """
    first, second = Ranking(x), Ranking(y)
    return np.concatenate(
        [_compute_spearman_block(first, second, block.astype(np.float64)) for block in iter_blocks(times)]
    )


def _compute_spearman_block(x: Ranking, y: Ranking, times: Floats) -> Floats:
    size = times.sum(0)
    spread, product = [], times
    for ranking in (x, y):
        equal = ranking.total @ times
        product = product * (2 * compute_running_sum(equal) - equal)[ranking.place]
        spread.append((size**3 - (equal * equal * equal).sum(0)) / 3)
    found = divide_or_nan(product.sum(0) - size**3, np.sqrt(spread[0]) * np.sqrt(spread[1]))
    return np.clip(found, -1, 1)


class Concordance:
    """Find, for every run, the runs that are smaller in both of two lists of numbers.

    Runs are sorted in two orders without ties, by x and by y, such that one run precedes another in both orders
    exactly if it is smaller in both lists. Each order is cut into about sqrt(n) blocks of as many runs. The runs that
    precede a run in both orders are

    * runs of the same block by x, compared one by one;
    * runs of an earlier block by x and the same block by y, compared one by one;
    * runs of an earlier block in both, summed block by block.

    That takes n^1.5 comparisons, which are shared by any number of weights.
    """

    def __init__(self, x: Floats | Ints, y: Floats | Ints) -> None:
        runs = len(x)
        # Of equal x the larger y comes first, of equal y the later by x: neither pair is in the same order twice.
        self.by_x: Ints = np.lexsort((-y, x)).astype(np.int64)
        place_x = _invert_permutation(self.by_x)
        self.by_y: Ints = np.lexsort((-place_x, y)).astype(np.int64)
        self.place_y = _invert_permutation(self.by_y)
        self.place_x = place_x
        self.side = max(1, math.isqrt(max(runs - 1, 0)) + 1)
        self.runs, self.room = runs, self.side * self.side
        self.block_x, self.block_y = place_x // self.side, self.place_y // self.side
        self._same_x = self._mark_earlier(self.place_y[self.by_x])
        self._same_y = self._mark_earlier(self.block_x[self.by_y])
        self._cells = make_indicator(self.block_x * self.side + self.block_y, self.room)

    def sum_below(self, weights: Counts) -> Counts:
        """Return ``(runs, columns)``: for each run, the total weight of the runs that are smaller in both lists."""
        found = np.empty_like(weights)
        found[self.by_x] = (self._same_x @ self._pad_weights(weights, self.by_x)).reshape(self.room, -1)[: self.runs]
        found[self.by_y] += (self._same_y @ self._pad_weights(weights, self.by_y)).reshape(self.room, -1)[: self.runs]
        found += self._sum_earlier_blocks(self._cells @ weights)[self.block_x, self.block_y]
        return found

    def sum_above(self, weights: Counts, below: Counts) -> Counts:
        """Return the same for the runs that are larger in both lists, given the result of :meth:`sum_below`."""
        found: Counts = weights.sum(0) + weights + below
        for order in (self.by_x, self.by_y):
            found[order] -= compute_running_sum(weights[order])
        return found

    def count_pairs(self, times: Counts) -> Floats:
        """Return the number of concordant pairs in each resample; a tie is not concordant."""
        by_x, by_y, cells = (
            self._pad_weights(times, self.by_x),
            self._pad_weights(times, self.by_y),
            self._cells @ times,
        )
        parts = ((by_x, self._same_x @ by_x), (by_y, self._same_y @ by_y), (cells, self._sum_earlier_blocks(cells)))
        columns = times.shape[1]
        sums = [_dot_columns(one.reshape(-1, columns), other.reshape(-1, columns)) for one, other in parts]
        return sums[0] + sums[1] + sums[2]

    def _pad_weights(self, weights: Counts, order: Ints) -> Counts:
        found = np.zeros((self.room, weights.shape[1]), dtype=weights.dtype)
        np.take(weights, order, axis=0, out=found[: self.runs])
        return found.reshape(self.side, self.side, -1)

    def _mark_earlier(self, keys: Ints) -> Counts:
        """Return an array whose ``[block, a, b]`` is 1 if b precedes a in the block and has the smaller key."""
        whole = np.full(self.room, self.room, dtype=np.int64)
        whole[: self.runs] = keys
        each = whole.reshape(self.side, self.side)
        return np.tril(each[:, None, :] < each[:, :, None], -1).astype(np.float32)

    def _sum_earlier_blocks(self, cells: Counts) -> Counts:
        """Return, for each cell, the sum over all cells that precede it in both orders."""
        found = np.zeros((self.side, self.side, cells.shape[1]), dtype=cells.dtype)
        found[1:, 1:] = cells.reshape(found.shape)[:-1, :-1]
        for k in range(1, self.side):
            found[k] += found[k - 1]
        for k in range(1, self.side):
            found[:, k] += found[:, k - 1]
        return found


def _invert_permutation(order: Ints) -> Ints:
    found = np.empty_like(order)
    found[order] = np.arange(len(order))
    return found


def _dot_columns(one: NDArray[Any], other: NDArray[Any]) -> Floats:
    """Return the sum of products in each column, exact for whole numbers."""
    return np.asarray(np.einsum("ar,ar->r", one.astype(np.float64), other.astype(np.float64)))


def kendall_a(x: ArrayLike, y: ArrayLike) -> float:
    """Return Kendall's tau-a: the share of concordant minus the share of discordant pairs of runs.

    The mean of ``sign(x_a - x_b) * sign(y_a - y_b)`` over all pairs: a tie counts as zero, so with ties not even a
    perfect measure reaches 1. Zero if all x or all y are equal; nan if there is no pair.

    Example:
        >>> kendall_a([1, 2, 2], [1, 2, 3])
        0.6666666666666666
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_kendall(values, gaps, make_unit_counts(len(values)))[0][0])


def kendall_b(x: ArrayLike, y: ArrayLike) -> float:
    """Return Kendall's tau-b: tau-a divided by the geometric mean of the shares of pairs untied in x and in y.

    nan if all x or all y are equal.

    Example:
        >>> round(kendall_b([1, 2, 2], [1, 2, 3]), 4)
        0.8165
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_kendall(values, gaps, make_unit_counts(len(values)))[1][0])


def resample_kendall(x: Floats, y: Floats, times: Counts) -> tuple[Floats, Floats]:
    """Return tau-a and tau-b of each resample; a run is not compared with its own copies."""
    order = Concordance(x, y)
    rankings = [Ranking(x), Ranking(y), Ranking(combine_codes([Ranking(x).place, Ranking(y).place], len(x)))]
    found = [_compute_kendall_block(order, rankings, block) for block in iter_blocks(times)]
    return np.concatenate([tau_a for tau_a, _ in found]), np.concatenate([tau_b for _, tau_b in found])


def _compute_kendall_block(order: Concordance, rankings: Sequence[Ranking], times: Counts) -> tuple[Floats, Floats]:
    # All numbers are integers below 2^53: sums are exact and do not depend on the order of the runs.
    counts = times.astype(np.float64)
    whole, copies = counts.sum(0) ** 2, (counts**2).sum(0)
    tied_x, tied_y, tied_both = (((ranking.total @ counts) ** 2).sum(0) for ranking in rankings)
    ordered_in_both = whole - tied_x - tied_y + tied_both
    # Counted over ordered pairs: concordant minus discordant ones.
    difference = 4 * order.count_pairs(times) - ordered_in_both
    tau_b = divide_or_nan(difference, np.sqrt((whole - tied_x) * (whole - tied_y)))
    return divide_or_nan(difference, whole - copies), np.clip(tau_b, -1, 1)
