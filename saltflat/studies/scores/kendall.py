"""Kendall's rank correlations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.arrays import Floats, once, paired, ratio, signs


def kendall_a(x: ArrayLike, y: ArrayLike) -> float:
    """Of all pairs of runs, the share that both order alike minus the share they order the other way round.

    The mean of ``sign(x_a - x_b) * sign(y_a - y_b)`` over all pairs: a tie counts as zero, so with ties not even a
    perfect measure reaches 1. Zero where all x or all y are equal; nan where there is no pair.

    Example:
        >>> kendall_a([1, 2, 2], [1, 2, 3])
        0.6666666666666666
    """
    values, gaps = paired(x, y)
    return float(drawn_kendall_a(values, gaps, once(len(values)))[0])


def kendall_b(x: ArrayLike, y: ArrayLike) -> float:
    """The same among the pairs that are not tied: divided by the geometric mean of how many have an order in x, in y.

    nan where all x or all y are equal.

    Example:
        >>> round(kendall_b([1, 2, 2], [1, 2, 3]), 4)
        0.8165
    """
    values, gaps = paired(x, y)
    return float(drawn_kendall_b(values, gaps, once(len(values)))[0])


def drawn_kendall_a(x: Floats, y: Floats, draws: Floats) -> Floats:
    """Tau-a of each resample; a run is not compared with its own copies."""
    pairs = draws.sum(1) ** 2 - (draws**2).sum(1)
    return ratio(_over_pairs(signs(x) * signs(y), draws), pairs)


def drawn_kendall_b(x: Floats, y: Floats, draws: Floats) -> Floats:
    """Tau-b of each resample; a run is not compared with its own copies."""
    across, down = signs(x), signs(y)
    ordered = _over_pairs(across**2, draws) * _over_pairs(down**2, draws)
    return np.clip(ratio(_over_pairs(across * down, draws), np.sqrt(ordered)), -1, 1)


def _over_pairs(each: Floats, draws: Floats) -> Floats:
    # Whole numbers below 2^53 all the way: sums are exact and do not depend on the order of the runs.
    return np.asarray(np.einsum("ra,ra->r", draws @ each, draws))
