"""The score of the PGDL competition (NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from saltflat.studies.scores.arrays import Floats, once, paired, ratio
from saltflat.studies.scores.information import least
from saltflat.studies.scores.layout import Layout
from saltflat.studies.scores.sign_tables import Cells, Pairs, all_pairs, cells_of, entropies, mirrored, sets_of, tables


def pgdl(x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[object]]) -> float:
    """Conditional mutual information as the competition scored it, from 0 to 100; of one task, here the study.

    It differs from the paper's form: a pair is larger or not larger, so a tie counts as not larger; every run is
    also paired with itself; only sets of exactly two axes are looked at (of one where there is but one); and every
    combination of settings that occurs weighs the same. On a complete grid without ties and many runs the two are
    close. nan where the gap's order is certain once the settings are known.

    Example:
        >>> axes = {"lr": [1, 1, 2, 2, 1, 1, 2, 2], "batch": [8, 16] * 4}
        >>> gap = [1, 2, 3, 4, 8, 7, 6, 5]
        >>> pgdl(gap, gap, axes), pgdl(axes["lr"], gap, axes)
        (100.0, 0.0)
    """
    values, gaps = paired(x, y)
    layout = Layout.of(axes, None, len(values))
    pairs = all_pairs(once(len(values)))
    cells = {name: cells_of(layout, each, pairs) for name, each in sets_of(layout, 2).items()}
    each = {name: competition_of(tables(values, gaps, pairs, of), of, pairs) for name, of in cells.items()}
    return float(least(each)[0])


def competition_of(table: Floats, cells: Cells, pairs: Pairs) -> Floats:
    """Of one set of axes in each resample; a run is paired with itself but not with its other copies."""
    same = table[cells.same] + mirrored(table[cells.same])
    # A run and itself: two ties.
    levels, runs = len(np.unique(cells.levels)), len(cells.levels)
    itself = csr_array((np.ones(runs), (cells.levels, np.arange(runs))), shape=(levels, runs)) @ pairs.alone
    same[:, 1, 1] += np.asarray(itself)[cells.level[cells.same]]
    apart = table[~cells.same]
    shared, entropy, total = entropies(_in_two(np.concatenate([same, apart, mirrored(apart)])))
    # The number of combinations cancels, so those that do not occur need not be counted.
    taken = total > 0
    means = (np.where(taken, each / np.where(taken, total, 1.0), 0.0).sum(0) for each in (shared, entropy))
    return 100 * ratio(*means)


def _in_two(table: Floats) -> Floats:
    """Not larger, and larger."""
    table = np.stack([table[:, 0] + table[:, 1], table[:, 2]], 1)
    return np.stack([table[:, :, 0] + table[:, :, 1], table[:, :, 2]], 2)
