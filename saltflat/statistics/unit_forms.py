"""The curvature along each unit's own weights: w(j)' H w(j) with the block of the same weights."""

from __future__ import annotations

from torch import Tensor

from saltflat.forms import FactoredGradient
from saltflat.statistics import ParameterSite, Statistic, register_statistic


def _sum_unit_forms(form: FactoredGradient, site: ParameterSite, axis: str = "column") -> Tensor:
    assert site.geometry is not None
    unit, units = site.geometry.index_units(axis)
    return form.sum_unit_squares(site.value, unit.to(site.value.device), units).double()


unit_forms = register_statistic(
    Statistic(
        "unit_forms",
        of="curvature",
        total=_sum_unit_forms,
        spread=None,
        meaning="How fast the mean loss bends when all weights of one unit grow together.",
        kind="matrix",
        options={"axis": "column"},
    )
)
