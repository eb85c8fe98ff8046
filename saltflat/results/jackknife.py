"""Compute standard errors over examples, by leaving out groups of them (jackknife).

The examples are split at random into a few groups. Every statistic is kept group by group, so that any function of
statistics can be evaluated with one group left out at a time, and the scatter of these values gives its standard error.
The split depends only on the number of examples: two networks measured on the same data have the same groups, and the
error of their *difference* comes from the differences group by group, in which most of the scatter cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm, t
from torch import Tensor

TOO_SMALL = "its standard error over examples is an underestimate"  # the end of a note about heavy tails


SHRUNK = 2.0**-600


@dataclass(frozen=True)
class Jackknife:
    """A number and its values with one group of examples left out at a time.

    Attributes:
        value: the number with all examples.
        without: the numbers with each group left out.
        sizes: the number of examples in each group.
    """

    value: float
    without: Sequence[float]
    sizes: Sequence[int]

    @property
    def stderr(self) -> float:
        r"""The standard error over examples: value +- 1.96 stderr is a 95 % interval.

        Group sizes differ slightly (Busing, Meijer and van der Leeden, 1999): with :math:`h_g = N / n_g`

        .. math::
            \frac1G \sum_g \frac{(\tilde\theta_g - \bar\theta)^2}{h_g - 1}, \quad
            \tilde\theta_g = h_g \theta - (h_g - 1) \theta_{(g)}

        stretched from the normal to Student's distribution with :math:`G - 1` degrees of freedom.

        Example:
            >>> mean = Jackknife(2.0, [2.5, 2.0, 1.5], [1, 1, 1])  # of 1, 2 and 3
            >>> round(mean.stderr / float(compute_student_factor(2)), 9)
            0.577350269
        """
        count = len(self.without)
        if count < 2:
            return math.nan
        if all(each == self.value for each in self.without):
            return 0.0
        try:
            return self._compute_stderr(1.0)
        except OverflowError:  # squares of such numbers are beyond the largest float
            return self._compute_stderr(SHRUNK) / SHRUNK

    def _compute_stderr(self, scale: float) -> float:
        """Return the standard error of the numbers times a power of two, which changes none of their digits."""
        count, total = len(self.without), sum(self.sizes)
        value, without = scale * self.value, [scale * each for each in self.without]
        ratios = [total / size for size in self.sizes]
        center = count * value - math.fsum((1 - 1 / h) * each for h, each in zip(ratios, without, strict=True))
        squares = [
            (h * value - (h - 1) * each - center) ** 2 / (h - 1) for h, each in zip(ratios, without, strict=True)
        ]
        return float(math.sqrt(math.fsum(squares) / count) * compute_student_factor(count - 1))


def compute_student_factor(freedom: float | NDArray[np.float64]) -> Any:
    """Return how much wider a 95 % interval is if the error has only a few degrees of freedom.

    >>> round(float(compute_student_factor(1)), 2), round(float(compute_student_factor(1e6)), 2)
    (6.48, 1.0)
    """
    return t.ppf(0.975, freedom) / norm.ppf(0.975)


_FREEDOM = np.geomspace(1, 1e6, 400)
_STRETCH = compute_student_factor(_FREEDOM)


def compute_variance_of_mean(per_draw: Tensor) -> Tensor:
    r"""Return the unbiased variance of a sum of draws, each scaled by ``1 / draws``, along the first axis.

    With :math:`Y_d = X_d / m` the estimate is :math:`\sum_d Y_d` and its variance
    :math:`\frac{m}{m-1} \sum_d (Y_d - \bar Y)^2`.

    >>> compute_variance_of_mean(torch.tensor([1.0, 3.0]))
    tensor(4.)
    """
    m = per_draw.shape[0]
    return (per_draw - per_draw.mean(0)).square().sum(0) * (m / (m - 1))


def compute_standard_error(variance: Tensor, squared: Tensor, draws: int) -> Tensor:
    r"""Return the standard error e for which value +- 1.96 e is a 95 % interval.

    The variance of a sum over examples is the sum of their variances, each estimated from a few draws. If a few
    examples carry most of it, that sum is itself uncertain: it has Satterthwaite's
    :math:`\nu = (m + 1) (\sum v)^2 / \sum v^2` degrees of freedom, and the error is stretched by the ratio of Student's
    t to the normal quantile.

    Args:
        variance: sum over examples of their variances.
        squared: sum over examples of their squared variances.
        draws: the number of draws of each example.

    >>> one, many = torch.tensor([1.0, 100.0]), torch.tensor([1.0, 100.0])
    >>> compute_standard_error(one, many, draws=4) / one.sqrt()  # one example alone; a hundred alike
    tensor([1.3116, 1.0024])
    """
    freedom = torch.where(squared > 0, (draws + 1) * variance.square() / squared, torch.ones_like(variance))
    wider = np.interp(np.log(freedom.clamp(min=1).cpu().numpy()), np.log(_FREEDOM), _STRETCH)
    return variance.sqrt() * torch.from_numpy(np.asarray(wider)).to(variance)
