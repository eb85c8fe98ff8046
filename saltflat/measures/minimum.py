"""Minimum sharpness (Ibayashi, Hamaguchi, Imaizumi, 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saltflat.balance import balance_graph
from saltflat.measures import Part, measure


@measure(
    on="network",
    invariant_to=("layer_scale",),
    reference="ibayashi2021minimum",
    formula="trace of the Hessian, smallest over factors of the layers that cancel",
)
def minimum_sharpness(curvature_trace: Mapping[str, Tensor], layer_chain: Sequence[tuple[str, str | None]]) -> Part:
    r"""The smallest Hessian trace among all networks that differ only by factors of their layers.

    .. math::
        \min_{\alpha > 0,\; \prod_d \alpha_d = 1} \; \sum_d \alpha_d^{-2} \, \mathrm{tr}\, H_{W_d}
        + \Big(\prod_{k \le d} \alpha_k\Big)^{-2} \mathrm{tr}\, H_{b_d}

    without biases :math:`D (\prod_d \mathrm{tr}\, H_{W_d})^{1/D}`. The layers' readings are the traces at the minimum,
    and ``details["scales"]`` holds the factors that reach it.

    Args:
        curvature_trace: of every parameter.
        layer_chain: names of weight and bias (None if there is none) of the layers, in order.

    Example:
        >>> traces = {"0.weight": torch.tensor(1.0), "2.weight": torch.tensor(16.0)}
        >>> found = minimum_sharpness(traces, [("0.weight", None), ("2.weight", None)])
        >>> round(float(found.value), 9), round(found.details["scales"]["2.weight"], 9)
        (8.0, 2.0)
    """
    chained = {name for pair in layer_chain for name in pair}
    # Parameters that no factor touches keep their part.
    constant = sum(float(value) for name, value in curvature_trace.items() if name not in chained)
    edges = [
        (name, tail, head, float(curvature_trace[name]))
        for number, (weight, bias) in enumerate(layer_chain)
        # The scale of what a layer gives is a node; inputs and outputs have the fixed scale of node 0.
        for head in [(number + 1) % len(layer_chain)]
        for name, tail in ((weight, number), (bias, 0))
        if name is not None and name in curvature_trace
    ]
    if any(trace < 0 for *_, trace in edges):
        return Part(torch.nan, notes=("a layer has a negative curvature trace: there is no minimum over scales",))
    names, tails, heads, traces = zip(*edges, strict=True)
    found = balance_graph(
        torch.tensor(tails), torch.tensor(heads), torch.tensor(traces, dtype=torch.float64), len(layer_chain)
    )
    z = found.potentials / 2
    scales = {
        weight: float((z[(number + 1) % len(z)] - z[number]).exp()) for number, (weight, _) in enumerate(layer_chain)
    }
    at_minimum = {
        name: trace * float((2 * (z[tail] - z[head])).exp()) if trace else 0.0
        for name, tail, head, trace in zip(names, tails, heads, traces, strict=True)
    }
    notes = found.notes
    if not found.attained:
        at_minimum = {}
        notes = (
            "a layer without curvature lets the others' be scaled away: the infimum is reached by no finite factors",
        )
    if len(layer_chain) == 1:
        notes = ("the network has no hidden layer: nothing can be rescaled, this is its Hessian trace",)
    return Part(
        found.value + constant,
        residual=found.residual,
        converged=found.converged,
        layers=at_minimum,
        notes=notes,
        details={"scales": scales, "attained": found.attained},
    )
