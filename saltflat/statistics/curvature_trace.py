"""The trace of every parameter's block of the Gauss-Newton matrix, without building its diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.errorbars import compute_variance_of_mean
from saltflat.forms import ColumnLayout, FactoredGradient
from saltflat.statistics import ParameterSite, Statistic, register_statistic


def _sum_traces(form: FactoredGradient, site: ParameterSite) -> Tensor:
    return form.compute_squared_norms([slice(None)]).double().sum()


def _compute_trace_spread(form: FactoredGradient, layout: ColumnLayout) -> Tensor:
    variance = compute_variance_of_mean(form.compute_squared_norms(layout.make_group_slices()).double())
    return torch.stack([variance.sum(), variance.square().sum()])


curvature_trace = register_statistic(
    Statistic(
        "curvature_trace",
        of="curvature",
        total=_sum_traces,
        spread=_compute_trace_spread,
        meaning="How fast the mean loss bends along all directions of a parameter, added up.",
        kind="scalar",
    )
)
