"""The diagonal of the Gauss-Newton matrix of the mean loss."""

from __future__ import annotations

from saltflat.statistics import Statistic, register

curvature_diagonal = register(
    Statistic(
        "curvature_diagonal",
        of="curvature",
        total=lambda form, site: form.squares(),
        spread=lambda form, layout: form.spread(layout),
        meaning="How fast the mean loss bends along each single parameter.",
    )
)
