"""The diagonal of the Gauss-Newton matrix of the mean loss."""

from __future__ import annotations

from saltflat.statistics import Statistic, register_statistic

curvature_diagonal = register_statistic(
    Statistic(
        "curvature_diagonal",
        of="curvature",
        total=lambda form, site: form.sum_squares(),
        spread=lambda form, layout: form.compute_spread(layout),
        meaning="How fast the mean loss bends along each single parameter.",
    )
)
