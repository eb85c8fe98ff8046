"""Spearman's correlation."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.arrays import Floats, once, paired
from saltflat.studies.scores.correlation import correlations


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """How nearly one grows whenever the other does, from -1 to 1: Pearson's correlation of the ranks.

    Equal values share the mean of their ranks. nan where all x or all y are equal.

    Example:
        >>> round(spearman([1, 2, 3, 4], [1, 8, 27, 64]), 12)
        1.0
    """
    values, gaps = paired(x, y)
    return float(drawn_spearman(values, gaps, once(len(values)))[0])


def drawn_spearman(x: Floats, y: Floats, draws: Floats) -> Floats:
    """The same of each resample, ranked anew; ``draws[r, a]`` is how often resample r has run a."""
    return correlations(_ranks(x, draws), _ranks(y, draws), draws)


def _ranks(x: Floats, draws: Floats) -> Floats:
    """Of every run in every resample, as a share of its size; copies of a run are equal values."""
    below = (x[:, None] < x[None, :]).astype(np.float64)
    level = (x[:, None] == x[None, :]).astype(np.float64)
    return np.asarray((draws @ (below + level / 2) + 0.5) / np.maximum(draws.sum(1, keepdims=True), 1.0))
