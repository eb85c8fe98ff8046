"""Correlations with intervals, from resamples of networks or of their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from saltflat.studies.scores.correlation import resample_kendall, resample_pearson
from saltflat.studies.scores.layout import Floats, Ints, compute_interval, divide_or_nan, draw_resamples

RESAMPLES = 2000
FEWEST = 5  # networks, and configurations, below which there are no correlations


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_resamples(cls, found: Floats) -> Estimate:
        """Return the estimate whose first resample is the number itself."""
        return cls(float(found[0]), *compute_interval(found[1:]))

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "-"
        return f"{self.value:.2f}" if np.isnan(self.low) else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def resample_correlation(x: Floats, y: Floats, units: Ints, kind: str = "pearson") -> Floats | None:
    """Return a correlation, and those of resamples of units with all their networks; None with too few.

    Args:
        x, y: numbers of the networks, finite.
        units: networks of one unit are drawn together.
        kind: ``"pearson"`` or ``"kendall"`` (tau-b).
    """
    if len(x) < FEWEST or len(set(units)) < FEWEST or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    times = draw_resamples(np.unique(units, return_inverse=True)[1], RESAMPLES, seed=0)
    return resample_pearson(x[None], y, times)[0] if kind == "pearson" else resample_kendall(x, y, times)[1]


def correlate(x: Floats, y: Floats, units: Ints, kind: str = "pearson") -> Estimate | None:
    """Return a correlation with its interval; None with too few networks. See :func:`resample_correlation`."""
    found = resample_correlation(x, y, units, kind)
    return None if found is None else Estimate.from_resamples(found)


def correlate_left(x: Floats, y: Floats, held: Floats, units: Ints) -> Estimate | None:
    """Return Pearson's partial correlation of x and y with a third number held fixed."""
    three = [resample_correlation(one, other, units) for one, other in ((x, y), (x, held), (y, held))]
    xy, xz, yz = three
    if xy is None or xz is None or yz is None:
        return None
    spread = (1 - xz**2) * (1 - yz**2)
    # Where the third is x or y up to rounding, nothing is left to correlate.
    return Estimate.from_resamples(divide_or_nan(xy - xz * yz, np.sqrt(np.where(spread > 1e-12, spread, 0.0))))


def compare_means(one: Sequence[float], other: Sequence[float]) -> tuple[Estimate, float]:
    """Return by how much the second mean is larger, with Welch's 95 % interval, and the p-value.

    >>> found, chance = compare_means([1.0, 2.0, 3.0], [11.0, 12.0, 13.0])
    >>> f"{found}, p = {chance:.4f}"
    '10.00 [7.73, 12.27], p = 0.0003'
    """
    change = float(np.mean(other) - np.mean(one))
    if min(len(one), len(other)) < 2:
        return Estimate(change, np.nan, np.nan), np.nan
    parts = [float(np.var(each, ddof=1)) / len(each) for each in (one, other)]
    error = float(np.sqrt(sum(parts)))
    if error == 0:
        return Estimate(change, change, change), float(change == 0)
    squares = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    freedom = sum(parts) ** 2 / squares
    half = float(t.ppf(0.975, freedom)) * error
    return Estimate(change, change - half, change + half), float(2 * t.sf(abs(change) / error, freedom))
