"""Standard deviations over the data of the channels that feed each weight."""

from __future__ import annotations

from saltflat.features import compute_input_deviations
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic


@statistic(per="layer", meaning="How far each input channel of a layer varies over the data.", passes=1)
def feature_deviation(setting: Setting) -> StatisticResult:
    """``(channels,)`` for each weight of a Linear layer or a convolution."""
    deviations, notes = compute_input_deviations(setting)
    return StatisticResult(deviations, notes=notes, without=lambda group: deviations)
