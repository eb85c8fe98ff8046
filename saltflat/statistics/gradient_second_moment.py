"""The diagonal of the empirical Fisher matrix: the mean square of the examples' gradients."""

from __future__ import annotations

from saltflat.statistics import Statistic, register_statistic

gradient_second_moment = register_statistic(
    Statistic(
        "gradient_second_moment",
        of="gradient",
        total=lambda form, site: form.sum_squares(),
        spread=None,
        meaning="How large the gradients of single examples are, in the mean square, for each parameter.",
    )
)
