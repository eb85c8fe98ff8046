"""Every example's squared gradient length, by parameter."""

from __future__ import annotations

from saltflat.statistics import Statistic, register_statistic

gradient_norms = register_statistic(
    Statistic(
        "gradient_norms",
        of="gradient",
        total=lambda form, site: form.compute_squared_norms([slice(None)])[0],
        spread=None,
        meaning="How large each single example's gradient is, squared.",
        kind="example",
    )
)
