"""Standard errors of sums over examples whose random columns were drawn a few times each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.stats import norm, t
from torch import Tensor


def compute_student_factor(freedom: Any) -> Any:
    """How much wider a 95 % interval is with an error known from a few degrees of freedom only.

    >>> round(float(compute_student_factor(1)), 2), round(float(compute_student_factor(1e6)), 2)
    (6.48, 1.0)
    """
    return t.ppf(0.975, freedom) / norm.ppf(0.975)


_FREEDOM = np.geomspace(1, 1e6, 400)
_STRETCH = compute_student_factor(_FREEDOM)


def compute_variance_of_mean(per_draw: Tensor) -> Tensor:
    r"""Unbiased variance of a sum of draws that were each scaled by ``1 / draws``, along the first axis.

    With :math:`Y_d = X_d / m` the estimate is :math:`\sum_d Y_d` and its variance
    :math:`\frac{m}{m-1} \sum_d (Y_d - \bar Y)^2`.

    >>> compute_variance_of_mean(torch.tensor([1.0, 3.0]))
    tensor(4.)
    """
    m = per_draw.shape[0]
    return (per_draw - per_draw.mean(0)).square().sum(0) * (m / (m - 1))


def compute_standard_error(variance: Tensor, squared: Tensor, draws: int) -> Tensor:
    r"""The error bar e for which value +- 1.96 e holds the truth 95 % of the time.

    The variance of a sum over examples is the sum of their variances, each known from a few draws only. When few
    examples carry most of it, that sum is itself uncertain: it has Satterthwaite's
    :math:`\nu = (m + 1) (\sum v)^2 / \sum v^2` degrees of freedom, and the error is stretched by the ratio of Student's
    t to the normal quantile.

    Args:
        variance: sum over examples of their variances.
        squared: sum over examples of their squared variances.
        draws: how many draws each of them comes from.

    >>> one, many = torch.tensor([1.0, 100.0]), torch.tensor([1.0, 100.0])
    >>> compute_standard_error(one, many, draws=4) / one.sqrt()  # one example alone; a hundred alike
    tensor([1.3116, 1.0024])
    """
    freedom = torch.where(squared > 0, (draws + 1) * variance.square() / squared, torch.ones_like(variance))
    wider = np.interp(np.log(freedom.clamp(min=1).cpu().numpy()), np.log(_FREEDOM), _STRETCH)
    return variance.sqrt() * torch.from_numpy(np.asarray(wider)).to(variance)
