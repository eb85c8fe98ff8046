"""The trace of every parameter's block of the Gauss-Newton matrix, without building its diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.errorbars import variance_of_mean
from saltflat.forms import Form, Layout
from saltflat.statistics import Site, Statistic, register


def _total(form: Form, site: Site) -> Tensor:
    return form.norms([slice(None)]).double().sum()


def _spread(form: Form, layout: Layout) -> Tensor:
    variance = variance_of_mean(form.norms(layout.groups()).double())
    return torch.stack([variance.sum(), variance.square().sum()])


curvature_trace = register(
    Statistic(
        "curvature_trace",
        of="curvature",
        total=_total,
        spread=_spread,
        meaning="How fast the mean loss bends along all directions of a parameter, added up.",
        kind="scalar",
    )
)
