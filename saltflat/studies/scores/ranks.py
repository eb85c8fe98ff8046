"""Spearman's correlation."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from saltflat.studies.scores.arrays import (
    Counts,
    Floats,
    Ints,
    check_paired_values,
    divide_or_nan,
    iter_blocks,
    make_unit_counts,
)

Numbers = TypeVar("Numbers", Floats, Counts)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """How nearly one grows whenever the other does, from -1 to 1: Pearson's correlation of the ranks.

    Equal values share the mean of their ranks. nan where all x or all y are equal.

    Example:
        >>> round(spearman([1, 2, 3, 4], [1, 8, 27, 64]), 12)
        1.0
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_spearman(values, gaps, make_unit_counts(len(values)))[0])


class Ranking:
    """Runs in groups of equal values, the smallest first.

    Attributes:
        place: of each run, its group.
        total: a sparse matrix that sums over each group.
    """

    def __init__(self, values: Floats | Ints) -> None:
        self.place: Ints = np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
        self.total = make_indicator(self.place, int(self.place.max(initial=-1)) + 1)

    @property
    def has_ties(self) -> bool:
        return self.total.shape[0] < len(self.place)


def make_indicator(codes: Ints, number: int) -> csr_array:
    """A matrix that sums the rows of each code: ``(codes, runs)``."""
    runs = len(codes)
    return csr_array((np.ones(runs, dtype=np.float32), (codes, np.arange(runs))), shape=(number, runs))


def compute_running_sum(x: Numbers) -> Numbers:
    """``np.cumsum(x, axis=0)``, several times faster where rows are long."""
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
    """The same of each resample, ranked anew; copies of a run are equal values.

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
