"""The curvature along each unit's own weights: w(j)' H w(j) with the block of the same weights."""

from __future__ import annotations

from torch import Tensor

from saltflat.forms import Form
from saltflat.statistics import Site, Statistic, register


def _total(form: Form, site: Site, axis: str = "column") -> Tensor:
    assert site.geometry is not None
    unit, units = site.geometry.units(axis)
    return form.unit_squares(site.value, unit.to(site.value.device), units).double()


unit_forms = register(
    Statistic(
        "unit_forms",
        of="curvature",
        total=_total,
        spread=None,
        meaning="How fast the mean loss bends when all weights of one unit grow together.",
        kind="matrix",
        options={"axis": "column"},
    )
)
