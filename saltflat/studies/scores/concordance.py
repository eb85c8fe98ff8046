"""Which pairs of runs two lists of numbers order alike, without looking at every pair."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saltflat.studies.scores.arrays import Counts, Floats, Ints
from saltflat.studies.scores.ranks import compute_running_sum, make_indicator


class Concordance:
    """For every run, the runs that are smaller in both of two lists of numbers.

    Runs are put into two orders without ties, by x and by y, such that one run comes before another in both of them
    exactly where it is smaller in both lists. Each order is cut into about sqrt(n) blocks of as many runs. Before a run
    in both orders are

    * runs of the same block by x, compared one by one;
    * runs of an earlier block by x and the same block by y, compared one by one;
    * runs of an earlier block in both, summed block by block.

    That takes n^1.5 comparisons, which serve any number of weights at once.
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
        """``(runs, columns)``: of each run, the weight of the runs that are smaller in both lists."""
        found = np.empty_like(weights)
        found[self.by_x] = (self._same_x @ self._pad_weights(weights, self.by_x)).reshape(self.room, -1)[: self.runs]
        found[self.by_y] += (self._same_y @ self._pad_weights(weights, self.by_y)).reshape(self.room, -1)[: self.runs]
        found += self._sum_earlier_blocks(self._cells @ weights)[self.block_x, self.block_y]
        return found

    def sum_above(self, weights: Counts, below: Counts) -> Counts:
        """The same of the runs that are larger in both, from those that are smaller in both."""
        found: Counts = weights.sum(0) + weights + below
        for order in (self.by_x, self.by_y):
            found[order] -= compute_running_sum(weights[order])
        return found

    def count_pairs(self, times: Counts) -> Floats:
        """The number of pairs in each resample that are ordered alike; a tie is no order."""
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
        """``[block, a, b]`` is 1 where b stands before a in the block and has the smaller key."""
        whole = np.full(self.room, self.room, dtype=np.int64)
        whole[: self.runs] = keys
        each = whole.reshape(self.side, self.side)
        return np.tril(each[:, None, :] < each[:, :, None], -1).astype(np.float32)

    def _sum_earlier_blocks(self, cells: Counts) -> Counts:
        """Sums over all cells that come before a cell both ways."""
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
    """The sum of products in each column, exact for whole numbers."""
    return np.asarray(np.einsum("ar,ar->r", one.astype(np.float64), other.astype(np.float64)))
