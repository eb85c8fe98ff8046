"""How much the loss rises under changes that are relative to the weights: on average, or at worst."""

from __future__ import annotations

from saltflat.errors import make_unknown_name_error
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic
from saltflat.statistics.average_rise import average_rise
from saltflat.statistics.worst_rise import worst_rise


@statistic(
    per="network",
    meaning="Rise of the loss under changes relative to the weights, on average or at worst.",
    passes=lambda case, draws, steps, **_: 3 * steps if case == "worst" else draws + 1,
)
def adaptive_rise(
    setting: Setting, *, case: str = "average", radius: float = 0.05, draws: int = 20, steps: int = 20
) -> StatisticResult:
    """:func:`average_rise` or :func:`worst_rise`, whichever ``case`` names."""
    if case == "average":
        return average_rise(setting, radius=radius, draws=draws)
    if case == "worst":
        return worst_rise(setting, radius=radius, steps=steps)
    raise make_unknown_name_error("case", case, ("average", "worst"))
