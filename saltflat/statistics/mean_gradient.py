"""The gradient of the mean loss."""

from __future__ import annotations

from torch import Tensor

from saltflat.forms import Form
from saltflat.statistics import Site, Statistic, register


def _total(form: Form, site: Site) -> Tensor:
    return form.expand(site.value.new_ones(form.columns, form.examples))


mean_gradient = register(
    Statistic(
        "mean_gradient",
        of="gradient",
        total=_total,
        spread=None,
        meaning="How fast the mean loss changes with each single parameter: 0 at a minimum.",
        degree=1,
        by_group=False,
    )
)
