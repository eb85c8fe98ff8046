"""Every example's gradient along the parameter itself."""

from __future__ import annotations

from saltflat.statistics import Statistic, register_statistic

gradient_along_weights = register_statistic(
    Statistic(
        "gradient_along_weights",
        of="gradient",
        total=lambda form, site: form.project(site.value)[0],
        spread=None,
        meaning="How fast each single example's loss changes when a parameter grows in proportion.",
        kind="example",
        degree=1,
    )
)
