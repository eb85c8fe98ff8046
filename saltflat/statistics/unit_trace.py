"""Traces of the curvature between two output units of a layer: sum over k of H[(s, k), (t, k)]."""

from __future__ import annotations

from torch import Tensor

from saltflat.errors import OptionError
from saltflat.forms import FactoredGradient
from saltflat.statistics import ParameterSite, Statistic, register_statistic


def _sum_unit_traces(form: FactoredGradient, site: ParameterSite, normalize: bool = True) -> Tensor:
    assert site.geometry is not None
    if not isinstance(normalize, bool):
        raise OptionError(f"Got normalize={normalize!r}. Want True or False. Do: leave it out for True.")
    scale = None
    if normalize and site.deviation is not None:
        # A feature divided by its deviation has gradients divided by it, too.
        unit, _ = site.geometry.index_units("column")
        scale = (1 / site.deviation)[unit].to(site.value)
    return form.compute_row_products(site.geometry, scale).double()


unit_trace = register_statistic(
    Statistic(
        "unit_trace",
        of="curvature",
        total=_sum_unit_traces,
        spread=None,
        meaning="How the bends of the mean loss along two units' incoming weights go together.",
        kind="matrix",
        features=True,
        options={"normalize": True},
    )
)
