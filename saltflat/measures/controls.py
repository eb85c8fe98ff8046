"""Controls: what is known to go with generalization without any curvature."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from saltflat.errors import OptionError
from saltflat.measures.registry import MeasureResult, measure


@measure(
    on="network",
    invariant_to=("layer_scale", "unit_scale"),
    reference="neyshabur2015norm",
    formula="sum of the outputs with every parameter squared and every input 1",
    smaller="nearer to zero along its paths",
    cost="passes",
)
def path_norm(path_sum: float) -> float:
    r"""Sum over all paths through the network of the product of squared parameters along the path.

    .. math::
        \sum_k f_{w^2}(\mathbf 1)_k = \sum_{\text{paths}} \prod_{w_i \in \text{path}} w_i^2

    one forward pass with squared parameters on an input of ones (Jiang et al. 2020). Paths begin at inputs and biases
    and end at outputs. Max pooling continues the largest path sum. Multiplying the weights into a unit by a and
    dividing those out of it by a leaves every product as it is. Defined for ReLU networks of linear layers,
    convolutions and pooling; fold BatchNorm first. It is of the whole network, also where ``layers=`` selects some.

    Args:
        path_sum: what that pass gives.

    Example:
        >>> path_norm(6.25)
        6.25
    """
    return path_sum


@measure(
    on="network",
    invariant_to=("layer_scale", "unit_scale"),
    reference="jiang2019predicting",
    formula="median over examples of (own logit - largest other) / length of their difference's gradient by the input",
    smaller="nearer to its decision boundary",
)
def input_margin(input_margins: Tensor, *, quantile: float = 0.5) -> MeasureResult:
    r"""Distance from a typical input to the decision boundary, to first order.

    .. math::
        \mathrm{median}_n\, \frac{f_{y_n}(x_n) - f_{k_n}(x_n)}{\|\nabla_x (f_{y_n} - f_{k_n})(x_n)\|_2},
        \quad k_n = \arg\max_{k \ne y_n} f_k(x_n)

    in units of the input. It is negative for a misclassified example. Within the linear region of a ReLU network it is
    the exact distance. It sees the function alone, so no change of the weights that keeps the function can change it.

    Args:
        input_margins: one number per example.
        quantile: another quantile than the median, from 0 to 1; between two examples it is interpolated.

    Example:
        >>> import torch
        >>> input_margin(torch.tensor([0.5, -1.0, 2.0])).value
        0.5
    """
    if isinstance(quantile, bool) or not isinstance(quantile, int | float) or not 0 <= quantile <= 1:
        raise OptionError(f"Expected a number from 0 to 1, but got quantile={quantile!r}. Try 0.5 for the median.")
    with np.errstate(invalid="ignore"):
        value = float(np.quantile(input_margins.double().numpy(), quantile)) if len(input_margins) else np.nan
    wrong = int((input_margins < 0).sum())
    details = {"misclassified": wrong}
    if not np.isfinite(value):
        why = "the gradient by the input is zero there" if len(input_margins) else "all examples are ignored"
        return MeasureResult(np.nan, notes=(why,), details=details)
    return MeasureResult(value, details=details)
