"""The gradient of the mean loss."""

from __future__ import annotations

from torch import Tensor

from saltflat.forms import FactoredGradient
from saltflat.statistics import ParameterSite, Statistic, register_statistic


def _sum_gradients(form: FactoredGradient, site: ParameterSite) -> Tensor:
    return form.sum_weighted(site.value.new_ones(form.columns, form.examples))


mean_gradient = register_statistic(
    Statistic(
        "mean_gradient",
        of="gradient",
        total=_sum_gradients,
        spread=None,
        meaning="How fast the mean loss changes with each single parameter: 0 at a minimum.",
        degree=1,
        by_group=False,
    )
)
