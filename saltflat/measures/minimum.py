"""Minimum sharpness (Ibayashi, Hamaguchi, Imaizumi, 2021), and the same over the scales of all units."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from saltflat.measures.registry import MeasureResult, measure
from saltflat.symmetry.group import Symmetries
from saltflat.symmetry.minimize import SmallestTrace, minimize_trace_by_layer, minimize_trace_by_unit


@measure(
    on="network",
    invariant_to=("layer_scale",),
    reference="ibayashi2021minimum",
    formula="trace of the Hessian, smallest over factors of the layers that cancel",
)
def minimum_sharpness(curvature_trace: Mapping[str, Tensor], rescalings: Symmetries) -> MeasureResult:
    r"""Smallest Hessian trace over all rescalings of the layers that keep the function.

    .. math::
        \min_{\alpha} \sum_p \alpha_p^{-2} \, \mathrm{tr}\, H_p

    over all factors :math:`\alpha_p > 0` of the parameters :math:`p` that leave the function alone. In a chain of D
    layers without biases that is :math:`D (\prod_d \mathrm{tr}\, H_{W_d})^{1/D}`; sums of a residual network tie
    factors together. The layers' readings are the traces at the minimum, and ``details["scales"]`` holds the factors
    that reach it.

    Args:
        curvature_trace: of every parameter.
        rescalings: of the network.

    Example:
        >>> from torch import nn
        >>> from saltflat.symmetry.find import find_symmetries
        >>> net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
        >>> traces = {"0.weight": torch.tensor(1.0), "2.weight": torch.tensor(16.0)}
        >>> found = minimum_sharpness(traces, find_symmetries(net, torch.randn(1, 2)))
        >>> round(float(found.value), 9), round(found.details["scales"]["2.weight"], 9)
        (8.0, 2.0)
    """
    if any(float(trace) < 0 for trace in curvature_trace.values()):
        return MeasureResult(
            torch.nan, notes=("a layer has a negative curvature trace: there is no minimum over scales",)
        )
    group = rescalings.restrict_to_layers()
    found = minimize_trace_by_layer(group, {name: float(trace) for name, trace in curvature_trace.items()})
    logs = group.compute_factor_logs(found.logs)
    scales = {name: float(torch.tensor(logs[name]).flatten()[0].exp()) for name in curvature_trace if logs[name].size}
    factors = {name: found.layers.get(name, 0.0) / float(trace) for name, trace in curvature_trace.items() if trace > 0}
    return _make_trace_result(
        found, {"scales": scales, "independent_scales": group.scales}, {"curvature_trace": factors}
    )


@measure(
    on="network",
    invariant_to=("layer_scale", "unit_scale"),
    reference="ibayashi2021minimum",
    formula="trace of the Hessian, smallest over sizes of all units",
)
def minimum_unit_sharpness(curvature_diagonal: Mapping[str, Tensor], rescalings: Symmetries) -> MeasureResult:
    r"""Smallest Hessian trace over all rescalings of the units that keep the function.

    .. math::
        \min_{s} \sum_{p, ij} H_{p, ij} \, e^{-2 (s_i - s_j)}

    where the entry :math:`ij` of the parameter :math:`p` leads from unit j to unit i, and inputs, outputs and all that
    notices a change of scale have :math:`s = 0`. An extension of minimum sharpness, and never above it.

    Args:
        curvature_diagonal: of every parameter.
        rescalings: of the network.

    Example:
        Two hidden units by themselves: 2 (sqrt(1 * 16) + sqrt(4 * 4)); one scale for both has 2 sqrt(5 * 20).

        >>> from torch import nn
        >>> from saltflat.symmetry.find import find_symmetries
        >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
        >>> diagonal = {"0.weight": torch.tensor([[1.0], [4.0]]), "2.weight": torch.tensor([[16.0, 4.0]])}
        >>> round(float(minimum_unit_sharpness(diagonal, find_symmetries(net, torch.randn(1, 1))).value), 9)
        16.0
    """
    if any(bool((values < 0).any()) for values in curvature_diagonal.values()):
        return MeasureResult(torch.nan, notes=("some curvatures are negative: there is no minimum over scales",))
    found = minimize_trace_by_unit(rescalings, curvature_diagonal)
    slopes = {name: each.reshape(curvature_diagonal[name].shape) for name, each in found.factors.items()}
    return _make_trace_result(found, {"independent_scales": rescalings.scales}, {"curvature_diagonal": slopes})


def _make_trace_result(found: SmallestTrace, details: dict[str, object], slopes: dict[str, object]) -> MeasureResult:
    return MeasureResult(
        found.value,
        residual=found.residual,
        converged=found.converged,
        layers=found.layers,
        slopes=slopes,
        notes=found.notes,
        details={**details, "attained": found.attained},
    )
