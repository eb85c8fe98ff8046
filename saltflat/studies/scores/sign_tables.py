"""How often the measure and the gap order a pair of runs alike, given the settings of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.sparse import csr_array
from scipy.special import xlogy

from saltflat.studies.scores.arrays import Floats, Ints
from saltflat.studies.scores.layout import Layout, joined, pair_draws

MOST = 2
JOIN = " + "


@dataclass(frozen=True)
class Pairs:
    """All pairs of runs, each once.

    Attributes:
        first, second: the runs.
        kind: of each pair; pairs of one kind are drawn equally often, as seeds of the same two configurations are.
        count: ``(kinds, resamples)``, how often each pair of a kind was drawn.
        alone: ``(runs, resamples)``, how often each run was.
    """

    first: Ints
    second: Ints
    kind: Ints
    count: Floats
    alone: Floats


@dataclass(frozen=True)
class Cells:
    """Pairs by the settings of their two runs, the smaller setting first.

    Attributes:
        cell: of each pair.
        swap: whether the pair's second run is that with the smaller setting.
        same: by cell, whether both runs have the same setting.
        level: by cell, the setting of its first run.
        levels: of each run.
    """

    cell: Ints
    swap: np.ndarray[tuple[int], np.dtype[np.bool_]]
    same: np.ndarray[tuple[int], np.dtype[np.bool_]]
    level: Ints
    levels: Ints


def all_pairs(draws: Floats) -> Pairs:
    """Every run with every other."""
    first, second = (each.astype(np.int64) for each in np.triu_indices(draws.shape[1], 1))
    return Pairs(first, second, *pair_draws(draws, first, second), np.ascontiguousarray(draws.T))


def sets_of(layout: Layout, least: int = 0) -> dict[str, tuple[str, ...]]:
    """Sets of at most two axes by name, those with one value left out; of at least so many, if there are."""
    names = list(layout.varying())
    sizes = range(min(least, len(names)), min(MOST, len(names)) + 1)
    return {JOIN.join(each): each for size in sizes for each in combinations(names, size)}


def cells_of(layout: Layout, names: Sequence[str], pairs: Pairs) -> Cells:
    """Where each pair falls when the settings of these axes are known for both of its runs."""
    levels = layout.level(names)
    a, b = levels[pairs.first], levels[pairs.second]
    low, high = np.minimum(a, b), np.maximum(a, b)
    cell = joined([low, high], len(a))
    number = int(cell.max()) + 1 if len(cell) else 0
    level, other = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    level[cell], other[cell] = low, high
    return Cells(cell, a > b, level == other, level, levels)


def tables(x: Floats, y: Floats, pairs: Pairs, cells: Cells) -> Floats:
    """``[cell, measure, gap, resample]``: pairs by the signs of the two differences, -1, 0 and 1 in this order."""
    turn = np.where(cells.swap, -1, 1)
    across = np.sign(x[pairs.first] - x[pairs.second]) * turn
    down = np.sign(y[pairs.first] - y[pairs.second]) * turn
    row = (cells.cell * 9 + (across + 1) * 3 + down + 1).astype(np.int64)
    shape = (9 * len(cells.same), len(pairs.count))
    found = csr_array((np.ones(len(row)), (row, pairs.kind)), shape=shape) @ pairs.count
    return np.asarray(found).reshape(len(cells.same), 3, 3, pairs.count.shape[1])


def mirrored(table: Floats) -> Floats:
    """The pairs taken in the other order: all signs turn."""
    return table[:, ::-1, ::-1]


def entropies(table: Floats) -> tuple[Floats, Floats, Floats]:
    """By cell and resample: mutual information and entropy of the gap's sign, both in nats times pairs; and the pairs.

    A count of n among N adds -n log(n / N) to N times the entropy, which is 0 for n = 0.
    """
    total = table.sum((1, 2))
    whole = xlogy(total, total)
    measure = whole - _each(table.sum(2)).sum(1)
    gap = whole - _each(table.sum(1)).sum(1)
    both = whole - _each(table).sum((1, 2))
    # What is left of zero by rounding must not look like information.
    rounding = 1e-13 * np.maximum(whole, 1.0)
    shared, gap = measure + gap - both, np.where(gap > rounding, gap, 0.0)
    return np.clip(np.where(shared > rounding, shared, 0.0), 0.0, gap), gap, total


def _each(counts: Floats) -> Floats:
    return np.asarray(xlogy(counts, counts), dtype=np.float64)
