"""Count how a measure and the gap order pairs of runs, by the settings of the two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from saltflat.studies.scores.correlation import Concordance, Ranking, compute_running_sum
from saltflat.studies.scores.layout import Counts, Floats, GridLayout, Ints

MAX_AXES = 2
SEPARATOR = " + "
# Pairs of settings whose resamples are approximated by a projection; 199 settings have fewer.
MAX_CELLS = 20_000
# Settings that are counted at a time; and pairs of settings times resamples whose tables are in memory at a time.
COLUMNS = 512
BLOCK = 100_000
# Below any count, so that 0 log 0 is 0.
TINY = 1e-300
# Integers below this are exact in float32.
EXACT_SINGLE = 2.0**24


@dataclass(frozen=True)
class SignTables:
    """Counts of pairs of runs by their two settings and the signs of the two differences, ordered -1, 0, 1.

    Attributes:
        counts: ``[cell, measure, gap, resample]``, ordered pairs whose first run has the cell's first setting.
        same: for each cell, whether its two settings are equal.
        runs: ``[cell, resample]``, the number of runs with the cell's second setting.
    """

    counts: Floats
    same: NDArray[np.bool_]
    runs: Floats


@dataclass(frozen=True)
class ResampledRuns:
    """How often resamples contain runs.

    Attributes:
        times: ``[run, resample]``.
        ordered: the same, with runs sorted by setting.
        runs: ``[setting, resample]``, the number of runs with the setting.
        copies: the sum of the squared counts: pairs of a run with itself and its copies.
    """

    times: Counts
    ordered: Counts
    runs: Floats
    copies: Floats


class Partition:
    """Runs grouped by their settings in some of the axes. A cell is a pair of settings whose first number is at most
    its second.

    All pairs of a cell of two settings with one run each have the same signs, so it holds no information in any
    resample. Settings with one run have the smallest numbers, so that cells whose second setting is one are skipped.

    Attributes:
        level: the number of each run's setting.
        number: the number of settings.
        singles: the number of settings with a single run.
        order: the runs, sorted by setting.
        start: the position in this order where each setting begins; the last entry is the number of runs.
    """

    def __init__(self, levels: Ints, seed: int) -> None:
        _, level, sizes = np.unique(levels, return_inverse=True, return_counts=True)
        rank = np.argsort(np.argsort(sizes > 1, kind="stable"), kind="stable")
        self.level: Ints = rank[level.reshape(-1)].astype(np.int64)
        self.sizes = np.bincount(self.level)
        self.number, self.singles = len(self.sizes), int((self.sizes == 1).sum())
        self.order: Ints = np.argsort(self.level, kind="stable").astype(np.int64)
        self.start: Ints = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self._seed = seed
        self._drawn: ResampledRuns | None = None

    def resample_runs(self, times: Counts) -> ResampledRuns:
        """Return the runs of resamples; cached, since all measures share them."""
        if self._drawn is None or self._drawn.times is not times:
            ordered, summing = times[self.order], self.make_sum_matrix(self.number)
            self._drawn = ResampledRuns(times, ordered, summing @ ordered, summing @ (ordered * ordered))
        return self._drawn

    def make_sum_matrix(self, levels: int) -> csr_array:
        """Return a matrix that sums over each of the first ``levels`` settings, with runs sorted by setting."""
        start = self.start[: levels + 1]
        runs = int(start[-1])
        return csr_array((np.ones(runs), np.arange(runs), start), shape=(levels, runs))

    def iter_columns(self) -> Iterator[Ints]:
        """Yield the settings with several runs, some at a time."""
        for first in range(self.singles, self.number, COLUMNS):
            yield np.arange(first, min(first + COLUMNS, self.number))

    @property
    def num_cells(self) -> int:
        """Return the number of cells of settings with several runs."""
        several = self.number - self.singles
        return several * (several + 1) // 2

    @cached_property
    def sampled_cells(self) -> tuple[Ints, Ints]:
        """Return the first and second settings of the cells used in a projection."""
        if self.num_cells <= MAX_CELLS:
            place = np.arange(self.num_cells)
        else:
            place = np.sort(np.random.default_rng([self._seed, 3]).choice(self.num_cells, MAX_CELLS, replace=False))
        # Cells are numbered by second setting: those of the second setting v start at v (v + 1) / 2.
        second = ((np.sqrt(8 * place + 1) - 1) // 2).astype(np.int64)
        return self.singles + place - second * (second + 1) // 2, self.singles + second


def list_axis_sets(layout: GridLayout, least: int = 0) -> dict[str, tuple[str, ...]]:
    """Return sets of ``least`` to two axes with several values, by name; smaller sets if there are fewer axes."""
    names = list(layout.find_varying_axes())
    sizes = range(min(least, len(names)), min(MAX_AXES, len(names)) + 1)
    return {SEPARATOR.join(each): each for size in sizes for each in combinations(names, size)}


def build_partitions(layout: GridLayout, least: int = 0, seed: int = 0) -> dict[str, Partition]:
    """Return the partition of the runs for each set of axes; sets that group the runs alike share one partition."""
    known: dict[bytes, Partition] = {}
    found = {}
    for name, axes in list_axis_sets(layout, least).items():
        levels = layout.compute_levels(axes)
        found[name] = known.setdefault(levels.tobytes(), Partition(levels, seed))
    return found


class PairSigns:
    """The signs of the differences of a measure and of the gap, over pairs of runs.

    Attributes:
        kinds: the combinations of signs that occur, of the measure and of the gap, 0 for negative to 2 for positive;
            without ties in both, which are the rest.
        mirrored: for each of them, the index of the kind of the reversed pair.
    """

    def __init__(self, x: Floats, y: Floats) -> None:
        self.x, self.y = Ranking(x), Ranking(y)
        across, down = ((0, 1, 2) if each.has_ties else (0, 2) for each in (self.x, self.y))
        self.kinds = [kind for kind in product(across, down) if kind != (1, 1)]
        self.mirrored = [self.kinds.index((2 - across, 2 - down)) for across, down in self.kinds]

    @cached_property
    def _concordance(self) -> Concordance:
        return Concordance(self.x.place, self.y.place)

    @cached_property
    def _discordance(self) -> Concordance:
        return Concordance(self.x.place, -self.y.place)

    def count_by_level(self, partition: Partition, columns: Ints) -> Counts:
        """Return ``[run, kind, column]``: how many runs with these settings have each kind of difference to the run;
        runs are sorted by setting."""
        runs = (partition.level[:, None] == columns).astype(np.float32)
        found: dict[tuple[int, int], Counts] = {}
        found[2, 2] = self._concordance.sum_below(runs)
        found[0, 0] = self._concordance.sum_above(runs, found[2, 2])
        less_x, more_x = _sum_less_and_more(self.x, runs)
        if self.x.has_ties or self.y.has_ties:
            found[2, 0] = self._discordance.sum_below(runs)
            found[0, 2] = self._discordance.sum_above(runs, found[2, 0])
            less_y, more_y = _sum_less_and_more(self.y, runs)
            found[2, 1], found[0, 1] = less_x - found[2, 2] - found[2, 0], more_x - found[0, 0] - found[0, 2]
            found[1, 2], found[1, 0] = less_y - found[2, 2] - found[0, 2], more_y - found[0, 0] - found[2, 0]
        else:
            found[2, 0], found[0, 2] = less_x - found[2, 2], more_x - found[0, 0]
        return np.stack([found[kind] for kind in self.kinds], axis=1)[partition.order]

    def make_tables(self, sums: Floats, total: Floats) -> Floats:
        """Convert ``[cell, kind, resample]`` to ``[cell, measure, gap, resample]``; the remaining pairs are tied in
        both."""
        found = np.zeros((len(sums), 3, 3, sums.shape[2]))
        for k, (across, down) in enumerate(self.kinds):
            found[:, across, down] = sums[:, k]
        if self.x.has_ties and self.y.has_ties:
            found[:, 1, 1] = np.maximum(total - sums.sum(1), 0.0)
        return found


def count_tables(signs: PairSigns, partition: Partition, columns: Ints, counts: Counts) -> SignTables:
    """Return the tables of all runs, for the cells whose second setting is among the columns."""
    flat = partition.make_sum_matrix(partition.number) @ counts.reshape(len(counts), -1)
    sums = flat.reshape(partition.number, len(signs.kinds), len(columns)).transpose(0, 2, 1)
    first, column = np.nonzero(np.arange(partition.number)[:, None] <= columns)
    same = first == columns[column]
    runs = partition.sizes[columns[column]]
    total = partition.sizes[first] * (runs - same)
    whole = total.astype(np.float64)[:, None]
    return SignTables(signs.make_tables(sums[first, column][:, :, None], whole), same, runs.astype(np.float64)[:, None])


def resample_tables(signs: PairSigns, partition: Partition, times: Counts) -> Iterator[SignTables]:
    """Yield the tables of each resample, for every cell; a run is not compared with its own copies."""
    x, y = signs.x.place[partition.order], signs.y.place[partition.order]
    known = partition.resample_runs(times)
    exact: Any = np.float32 if float(known.runs.sum(0).max(initial=0)) ** 2 < EXACT_SINGLE else np.float64
    drawn, runs, copies = known.ordered.astype(exact), known.runs, known.copies
    held: list[tuple[Floats, Floats, NDArray[np.bool_], Floats]] = []
    size = 0
    for second in range(partition.singles, partition.number):
        begin, end = partition.start[second : second + 2]
        signs_x, signs_y = (_compare_signs(each[:end, None], each[None, begin:end]) for each in (x, y))
        summing = partition.make_sum_matrix(second + 1).astype(exact)
        sums = np.empty((second + 1, len(signs.kinds), times.shape[1]))
        for k, (across, down) in enumerate(signs.kinds):
            alike = (signs_x[across] & signs_y[down]).astype(exact)
            sums[:, k] = summing @ ((alike @ drawn[begin:end]) * drawn[:end])
        total = runs[: second + 1] * runs[second]
        total[second] -= copies[second]
        same = np.arange(second + 1) == second
        held.append((sums, total, same, np.broadcast_to(runs[second], total.shape)))
        size += sums[:, 0].size
        if size > BLOCK or second == partition.number - 1:
            sums, total, same, second_runs = (np.concatenate(each) for each in zip(*held, strict=True))
            yield SignTables(signs.make_tables(sums, total), same, second_runs)
            held, size = [], 0


class HajekProjection:
    r"""Approximate the tables of resamples without visiting every pair in each.

    The share of a kind of pair in a cell is a mean over the runs of two settings, :math:`p = \sum_{ab} t_{ab} / m n`.
    In a resample with weights :math:`d_a` and :math:`d_b`, which add up to M and N, it is approximated by

    .. math::
        \sum_a \frac{d_a}{M} \bar t_{a} + \sum_b \frac{d_b}{N} \bar t_{b} - p,

    with :math:`\bar t` the shares among the pairs of one run (Hájek's projection). The neglected term,
    :math:`\sum_{ab} (d_a / M - 1 / m) (d_b / N - 1 / n) t_{ab}`, is smaller than the others by the square root of the
    number of configurations of a setting. The number of pairs in each cell is exact.
    """

    def __init__(self, signs: PairSigns, partition: Partition, times: Counts) -> None:
        self._signs, self._partition, self._drawn = signs, partition, partition.resample_runs(times)
        first, second = partition.sampled_cells
        # Every cell, from both of its settings.
        self._own, self._other = np.concatenate([first, second]), np.concatenate([second, first])
        self._sums = np.zeros((len(self._own), len(signs.kinds), times.shape[1]), dtype=np.float32)
        self._whole = np.zeros((len(self._own), len(signs.kinds), 1))

    def add(self, columns: Ints, counts: Counts) -> None:
        """Add the counts of runs with these settings."""
        here = np.flatnonzero((self._other >= columns[0]) & (self._other <= columns[-1]))
        here = here[np.argsort(self._own[here], kind="stable")]
        levels, starts = np.unique(self._own[here], return_index=True)
        for level, cells in zip(levels, np.split(here, starts[1:]), strict=True):
            members = slice(*self._partition.start[level : level + 2])
            some = counts[members][:, :, self._other[cells] - columns[0]]
            some = some.reshape(len(some), -1)
            shape = (len(self._signs.kinds), len(cells), -1)
            self._sums[cells] = (some.T @ self._drawn.ordered[members]).reshape(shape).transpose(1, 0, 2)
            self._whole[cells] = some.sum(0, dtype=np.float64).reshape(shape).transpose(1, 0, 2)

    def iter_tables(self) -> Iterator[SignTables]:
        """Yield the tables of each resample, for the sampled cells."""
        cells, runs = len(self._own) // 2, self._drawn.runs
        step = max(1, BLOCK // max(1, runs.shape[1]))
        for start in range(0, cells, step):
            some = np.arange(start, min(start + step, cells))
            first, second = self._own[some], self._other[some]
            same = first == second
            share, whole = self._compute_shares(some, same)
            share += self._compute_shares(cells + some, same)[0][:, self._signs.mirrored]
            total = runs[first] * runs[second] - np.where(same[:, None], self._drawn.copies[first], 0.0)
            sums = np.maximum(share - whole, 0.0) * total[:, None]
            yield SignTables(self._signs.make_tables(sums, total), same, runs[second])

    def _compute_shares(self, cells: Ints, same: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the share of each kind among the pairs of a run, averaged over the runs of a resample and all runs."""
        own, others = self._own[cells], (self._partition.sizes[self._other[cells]] - same)[:, None]
        weight = self._drawn.runs[own] * others
        share = self._sums[cells] / np.where(weight > 0, weight, np.inf)[:, None]
        return share, self._whole[cells] / (self._partition.sizes[own, None] * others)[:, None]


def mirror_signs(counts: Floats) -> Floats:
    """Return the counts of the reversed pairs, whose signs are all flipped."""
    return counts[:, ::-1, ::-1]


def compute_entropies(counts: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the mutual information and the entropy of the gap's sign, both in nats times pairs, and the pairs.

    A count of n among N adds -n log(n / N) to N times the entropy, which is 0 for n = 0.
    """
    total = counts.sum((1, 2))
    whole = _compute_x_log_x(total)
    measure = whole - _compute_x_log_x(counts.sum(2)).sum(1)
    gap = whole - _compute_x_log_x(counts.sum(1)).sum(1)
    both = whole - _compute_x_log_x(counts).sum((1, 2))
    # Rounding errors around zero must not count as information.
    rounding = 1e-13 * np.maximum(whole, 1.0)
    shared, gap = measure + gap - both, np.where(gap > rounding, gap, 0.0)
    return np.clip(np.where(shared > rounding, shared, 0.0), 0.0, gap), gap, total


def _compute_x_log_x(counts: Floats) -> Floats:
    return counts * np.log(np.maximum(counts, TINY))


def _compare_signs(first: Ints, second: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where the first is smaller, equal and larger."""
    return first < second, first == second, first > second


def _sum_less_and_more(ranking: Ranking, weights: Counts) -> tuple[Counts, Counts]:
    """Return, for each run, the total weight of the runs with smaller and with larger values."""
    equal = ranking.total @ weights
    up_to = compute_running_sum(equal)
    return (up_to - equal)[ranking.place], (up_to[-1] - up_to)[ranking.place]
