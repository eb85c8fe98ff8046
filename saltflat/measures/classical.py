"""The yardsticks that newer measures are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saltflat.measures.registry import MeasureResult, measure


@measure(on="parameters", reference="tsuzuku2020normalized", formula="trace of the Hessian of the mean loss")
def hessian_trace(curvature_trace: Tensor) -> Tensor:
    r"""Trace of the Hessian: curvature of the loss summed over all directions.

    .. math::
        \mathrm{tr}\, H = \sum_i \partial^2 L / \partial w_i^2

    by the Gauss-Newton matrix, whose diagonal is the Hessian's where the report's certificate holds. Doubling a layer
    divides its part by four.

    Example:
        >>> import torch
        >>> hessian_trace(torch.tensor(3.0))
        tensor(3.)
    """
    return curvature_trace


@measure(
    on="network",
    reference="tsuzuku2020normalized",
    formula="largest eigenvalue of the Hessian of the mean loss",
    fixed={"scaled": "none"},
)
def hessian_top_eigenvalue(hessian_top: Mapping[str, Any]) -> MeasureResult:
    r"""Largest eigenvalue of the Hessian: curvature of the loss in its sharpest direction.

    .. math::
        \lambda_{\max}(H)

    of the true Hessian over all parameters: the largest eigenvalue, not the largest in size.

    Example:
        >>> found = {"value": 2.0, "residual": 1e-6, "bound": 1e-9, "products": 40, "converged": True}
        >>> hessian_top_eigenvalue(found).value
        2.0
    """
    return _make_eigenvalue_result(hessian_top)


@measure(
    on="network",
    invariant_to=("layer_scale",),
    reference="rangamani2019scale",
    formula="largest eigenvalue of D^1/2 H D^1/2, where D holds each parameter's squared norm",
    fixed={"scaled": "quotient"},
)
def quotient_sharpness(hessian_top: Mapping[str, Any]) -> MeasureResult:
    r"""Largest curvature of the loss when lengths are relative to each layer's norm.

    .. math::
        \lambda_{\max}(D^{1/2} H D^{1/2}), \quad D = |W_l|_F^2 \text{ for all entries of } W_l

    Multiplying a layer by a divides H by a on both sides and multiplies :math:`D^{1/2}` by a: they cancel. Factors that
    differ from unit to unit do not.

    Args:
        hessian_top: the eigenvalue of the scaled Hessian.
    """
    return _make_eigenvalue_result(hessian_top)


@measure(
    on="weights",
    reference="tsuzuku2020normalized",
    formula="sum of the squares of all weights",
    smaller="nearer to zero weights",
)
def squared_norm(weight: Tensor) -> Tensor:
    r"""Squared norm of the weights: :math:`\sum_l |W_l|_F^2`, without biases.

    Example:
        >>> import torch
        >>> squared_norm(torch.tensor([[3.0, 4.0]]))
        tensor(25.)
    """
    return weight.square().sum()


@measure(
    on="network",
    reference="neyshabur2017exploring",
    formula="length of the difference between the parameters and their initial values",
    smaller="nearer to where training began",
)
def distance_from_init(weight: Mapping[str, Tensor], initial_weight: Mapping[str, Tensor]) -> MeasureResult:
    r"""Distance of the parameters from their initial values: :math:`|w - w_0|_2`.

    Example:
        >>> import torch
        >>> one, two = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
        >>> distance_from_init({"a": one, "b": two}, {"a": torch.zeros(2), "b": torch.zeros(2)}).value
        5.0
    """
    squares = {
        name: float((each.double() - initial_weight[name].to(each).double()).square().sum())
        for name, each in weight.items()
    }
    return MeasureResult(sum(squares.values()) ** 0.5, layers={name: each**0.5 for name, each in squares.items()})


def _make_eigenvalue_result(top: Mapping[str, Any]) -> MeasureResult:
    details = {"error_bound": top["bound"], "products": top["products"]}
    return MeasureResult(top["value"], residual=top["residual"], converged=top["converged"], details=details)
