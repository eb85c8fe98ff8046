"""Kendall's rank correlations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.arrays import (
    Counts,
    Floats,
    check_paired_values,
    divide_or_nan,
    iter_blocks,
    make_unit_counts,
)
from saltflat.studies.scores.concordance import Concordance
from saltflat.studies.scores.layout import combine_codes
from saltflat.studies.scores.ranks import Ranking


def kendall_a(x: ArrayLike, y: ArrayLike) -> float:
    """Of all pairs of runs, the share that both order alike minus the share they order the other way round.

    The mean of ``sign(x_a - x_b) * sign(y_a - y_b)`` over all pairs: a tie counts as zero, so with ties not even a
    perfect measure reaches 1. Zero where all x or all y are equal; nan where there is no pair.

    Example:
        >>> kendall_a([1, 2, 2], [1, 2, 3])
        0.6666666666666666
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_kendall(values, gaps, make_unit_counts(len(values)))[0][0])


def kendall_b(x: ArrayLike, y: ArrayLike) -> float:
    """The same among the pairs that are not tied: divided by the geometric mean of how many have an order in x, in y.

    nan where all x or all y are equal.

    Example:
        >>> round(kendall_b([1, 2, 2], [1, 2, 3]), 4)
        0.8165
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_kendall(values, gaps, make_unit_counts(len(values)))[1][0])


def resample_kendall(x: Floats, y: Floats, times: Counts) -> tuple[Floats, Floats]:
    """Tau-a and tau-b of each resample; a run is not compared with its own copies."""
    order = Concordance(x, y)
    rankings = [Ranking(x), Ranking(y), Ranking(combine_codes([Ranking(x).place, Ranking(y).place], len(x)))]
    found = [_compute_kendall_block(order, rankings, block) for block in iter_blocks(times)]
    return np.concatenate([tau_a for tau_a, _ in found]), np.concatenate([tau_b for _, tau_b in found])


def _compute_kendall_block(order: Concordance, rankings: Sequence[Ranking], times: Counts) -> tuple[Floats, Floats]:
    # Whole numbers below 2^53 all the way: sums are exact and do not depend on the order of the runs.
    counts = times.astype(np.float64)
    whole, copies = counts.sum(0) ** 2, (counts**2).sum(0)
    tied_x, tied_y, tied_both = (((ranking.total @ counts) ** 2).sum(0) for ranking in rankings)
    ordered_in_both = whole - tied_x - tied_y + tied_both
    # All of these are over ordered pairs, and with pairs ordered alike less those ordered otherwise.
    difference = 4 * order.count_pairs(times) - ordered_in_both
    tau_b = divide_or_nan(difference, np.sqrt((whole - tied_x) * (whole - tied_y)))
    return divide_or_nan(difference, whole - copies), np.clip(tau_b, -1, 1)
