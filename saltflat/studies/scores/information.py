"""Conditional mutual information (Jiang et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.arrays import Floats, once, paired, ratio
from saltflat.studies.scores.layout import Layout
from saltflat.studies.scores.sign_tables import Cells, all_pairs, cells_of, entropies, mirrored, sets_of, tables


@dataclass(frozen=True)
class Information:
    """The least over the sets of axes, and each set (``"lr + batch"``, ``""`` for none); nan where nothing is left
    to know."""

    least: float
    by_set: dict[str, float]


def conditional_information(x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[object]]) -> Information:
    r"""What the measure's order of two runs tells about the gap's order beyond what the settings tell, from 0 to 1.

    .. math::
        K = \min_{|S| \le 2} \frac{I(V_\mu; V_g \mid U_S)}{H(V_g \mid U_S)}

    over all ordered pairs of different runs: :math:`V` is the sign of the difference, with a tie a third value, and
    :math:`U_S` the settings of both runs in the axes :math:`S`. Averages over :math:`U_S` weigh by its probability. A
    measure that only follows one or two axes tells nothing once these are known. The sign of the relation is not
    seen: an anti-correlated measure tells as much. A set after which the gap's order is certain is left out.

    Example:
        >>> lr, gap = [1, 1, 2, 2], [1, 2, 3, 4]
        >>> conditional_information(lr, gap, {"lr": lr}).by_set["lr"]
        0.0
        >>> conditional_information(gap, gap, {"lr": lr}).least
        1.0
    """
    values, gaps = paired(x, y)
    layout = Layout.of(axes, None, len(values))
    pairs = all_pairs(once(len(values)))
    cells = {name: cells_of(layout, each, pairs) for name, each in sets_of(layout).items()}
    by_set = {name: float(information_of(tables(values, gaps, pairs, each), each)[0]) for name, each in cells.items()}
    return Information(float(least(by_set)), by_set)


def information_of(table: Floats, cells: Cells) -> Floats:
    """Of one set of axes in each resample; a run is not compared with its own copies."""
    # Where the settings are the same, both orders of a pair fall into one cell. Elsewhere they fall into two, which are
    # mirrors of each other and tell the same: one of them, counted twice.
    same = cells.same[:, None, None, None]
    shared, entropy, _ = entropies(np.where(same, table + mirrored(table), table))
    twice = np.where(cells.same, 1.0, 2.0)[:, None]
    return ratio((twice * shared).sum(0), (twice * entropy).sum(0))


def least(by_set: Mapping[str, ArrayLike]) -> Floats:
    """The least over the sets that have a value; nan where none has."""
    return np.asarray(np.fmin.reduce(np.array(list(by_set.values()), dtype=np.float64)), dtype=np.float64)
