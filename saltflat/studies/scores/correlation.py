"""Pearson's correlation."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.arrays import Floats, once, paired, ratio

# A resample of equal values has this much variance left by rounding, of values that span about one.
ROUNDING = (4 * np.finfo(np.float64).eps) ** 2


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    r"""How nearly the points lie on a straight line, from -1 to 1.

    .. math::
        r = \frac{\sum (x - \bar x)(y - \bar y)}{\sqrt{\sum (x - \bar x)^2 \sum (y - \bar y)^2}}

    One far-off run can make or break it. nan where all x or all y are equal.

    Example:
        >>> round(pearson([1, 2, 3], [10, 20, 40]), 3)
        0.982
    """
    values, gaps = paired(x, y)
    return float(drawn_pearson(values, gaps, once(len(values)))[0])


def drawn_pearson(x: Floats, y: Floats, draws: Floats) -> Floats:
    """The same of each resample; ``draws[r, a]`` is how often resample r has run a."""
    return correlations(_scaled(x)[None, :], _scaled(y)[None, :], draws)


def correlations(x: Floats, y: Floats, draws: Floats) -> Floats:
    """Of each resample, whose values may be its own: x and y are ``(resamples or 1, runs)`` and span about one."""
    if not draws.shape[1]:
        return np.full(len(draws), np.nan)
    total = draws.sum(1, keepdims=True)
    dx = x - ratio((draws * x).sum(1, keepdims=True), total)
    dy = y - ratio((draws * y).sum(1, keepdims=True), total)
    xx, yy, xy = ((draws * product).sum(1) / total[:, 0] for product in (dx * dx, dy * dy, dx * dy))
    known = (xx > ROUNDING) & (yy > ROUNDING)
    return np.clip(ratio(np.where(known, xy, 0.0), np.where(known, np.sqrt(xx) * np.sqrt(yy), 0.0)), -1, 1)


def _scaled(x: Floats) -> Floats:
    """Centred, and at most one: neither the largest nor the smallest floats overflow in a square."""
    if not len(x) or x.min() == x.max():
        return np.zeros_like(x)
    x = x / np.abs(x).max()
    x = x - x.mean()
    return np.asarray(x / np.abs(x).max())
