"""Pearson's correlation."""

from __future__ import annotations

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

# A resample of equal values has this much variance left by rounding, of values that span about one.
ROUNDING = (4 * np.finfo(np.float64).eps) ** 2
# A variance may be a difference of moments that are so many times larger than itself: two digits are lost.
CANCELLATION = 100.0


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    r"""How nearly the points lie on a straight line, from -1 to 1.

    .. math::
        r = \frac{\sum (x - \bar x)(y - \bar y)}{\sqrt{\sum (x - \bar x)^2 \sum (y - \bar y)^2}}

    One far-off run can make or break it. nan where all x or all y are equal.

    Example:
        >>> round(pearson([1, 2, 3], [10, 20, 40]), 3)
        0.982
    """
    values, gaps = check_paired_values(x, y)
    return float(resample_pearson(values[None], gaps, make_unit_counts(len(values)))[0, 0])


def resample_pearson(x: Floats, y: Floats, times: Counts) -> Floats:
    """``(measures, resamples)``; x is ``(measures, runs)``."""
    if not len(y):
        return np.full((len(x), times.shape[1]), np.nan)
    x, y = np.stack([_scale_values(each) for each in x]), _scale_values(y)
    sums = np.concatenate([x, x * x, x * y, y[None], (y * y)[None], np.ones((1, len(y)))])
    return np.concatenate(
        [_compute_pearson_block(x, y, sums, block.astype(np.float64)) for block in iter_blocks(times)], axis=1
    )


def _compute_pearson_block(x: Floats, y: Floats, sums: Floats, times: Floats) -> Floats:
    *parts, my, yy, total = np.split(sums @ times, [len(x), 2 * len(x), 3 * len(x), 3 * len(x) + 1, 3 * len(x) + 2])
    mx, xx, xy, my, yy = (divide_or_nan(each, total) for each in (*parts, my, yy))
    xx, yy, xy = xx - mx * mx, yy - my * my, xy - mx * my
    found = _compute_correlation(xx, yy, xy)
    # Where a resample lacks the runs that make up most of the spread, differences of moments are mostly rounding.
    lossy = ~((CANCELLATION * xx > mx * mx) & (CANCELLATION * yy > my * my))
    for measure in np.flatnonzero(lossy.any(1)):
        again = np.flatnonzero(lossy[measure])
        found[measure, again] = _compute_two_pass_pearson(x[measure, :, None], y[:, None], times[:, again])
    return found


def _compute_two_pass_pearson(x: Floats, y: Floats, times: Floats) -> Floats:
    total = times.sum(0)
    dx, dy = x - divide_or_nan((times * x).sum(0), total), y - divide_or_nan((times * y).sum(0), total)
    return _compute_correlation(*(divide_or_nan((times * each).sum(0), total) for each in (dx * dx, dy * dy, dx * dy)))


def _compute_correlation(xx: Floats, yy: Floats, xy: Floats) -> Floats:
    known = (xx > ROUNDING) & (yy > ROUNDING)
    norms = np.sqrt(np.where(known, xx, 0.0)) * np.sqrt(np.where(known, yy, 0.0))
    return np.clip(divide_or_nan(np.where(known, xy, 0.0), norms), -1, 1)


def _scale_values(x: Floats) -> Floats:
    """Centred, and at most one: neither the largest nor the smallest floats overflow in a square."""
    if not len(x) or x.min() == x.max():
        return np.zeros_like(x)
    x = x / np.abs(x).max()
    x = x - x.mean()
    return np.asarray(x / np.abs(x).max())
