"""Traces of the curvature between two output units of a layer: sum over k of H[(s, k), (t, k)]."""

from __future__ import annotations

from torch import Tensor

from saltflat.errors import OptionError
from saltflat.forms import Form
from saltflat.statistics import Site, Statistic, register


def _total(form: Form, site: Site, normalize: bool = True) -> Tensor:
    assert site.geometry is not None
    if not isinstance(normalize, bool):
        raise OptionError(f"Got normalize={normalize!r}. Want True or False. Do: leave it out for True.")
    scale = None
    if normalize and site.deviation is not None:
        # A feature divided by its deviation has gradients divided by it, too.
        unit, _ = site.geometry.units("column")
        scale = (1 / site.deviation)[unit].to(site.value)
    return form.row_products(site.geometry, scale).double()


unit_trace = register(
    Statistic(
        "unit_trace",
        of="curvature",
        total=_total,
        spread=None,
        meaning="How the bends of the mean loss along two units' incoming weights go together.",
        kind="matrix",
        features=True,
        options={"normalize": True},
    )
)
