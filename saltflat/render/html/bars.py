"""Compute bars for the contributions of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saltflat.render.html.page import format_quantity_html as quantity
from saltflat.render.html.page import is_log_scaled
from saltflat.render.report import collect_layers, find_main_layers
from saltflat.results.report import Reading

MOST_LAYERS = 24


@dataclass(frozen=True)
class Bar:
    """One bar, on an axis of length 100.

    Attributes:
        series: the number of the network, from 0.
        label: the label of the network.
        start: where the bar begins.
        width: its length; 0 if there is no number.
        low: where its 95 % interval begins, None without one.
        high: where its interval ends.
        told: the number as text.
    """

    series: int
    label: str
    start: float
    width: float
    low: float | None
    high: float | None
    told: str


@dataclass(frozen=True)
class BarChart:
    """Bars by layer, or of whole networks; ``hidden`` counts smaller layers that are not shown."""

    name: str
    rows: list[tuple[str, list[Bar]]]
    log: bool
    hidden: int


def build_chart(name: str, series: Mapping[str, Reading], labels: Sequence[str], layers: bool = True) -> BarChart:
    """Return the bars of one measure.

    Args:
        name: the name of the measure.
        series: readings by label.
        labels: the labels of all networks, so that each keeps its color.
        layers: make a row per layer, else one row for the whole networks.
    """
    readings = list(series.values())
    known = collect_layers(readings) if layers else []
    shown = find_main_layers(readings, known, MOST_LAYERS) if layers else [""]
    parts = {row: {label: _get_value_and_error(reading, row) for label, reading in series.items()} for row in shown}
    values = [v for row in parts.values() for v, _ in row.values() if v is not None and math.isfinite(v)]
    log = bool(values) and is_log_scaled([value for value in values if value] or [0.0])
    # With room for intervals; one that reaches below zero has no such end on a logarithmic axis.
    ends = [end for row in parts.values() for each in row.values() for end in _compute_interval_ends(*each)]
    scale = _compute_axis_range([value for value in [*values, *ends] if value > 0 or not log], log)
    rows = [
        (row, [_build_bar(labels.index(label), label, *each, scale, log) for label, each in found.items()])
        for row, found in parts.items()
    ]
    return BarChart(name, rows, log, len(known) - len(shown) if layers else 0)


def _get_value_and_error(reading: Reading, row: str) -> tuple[float | None, float | None]:
    return (reading.layers.get(row), reading.layer_stderr.get(row)) if row else (reading.value, reading.stderr)


def _compute_axis_range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Return the ends of the axis; a logarithmic one begins below the smallest value, so that it has a bar, too."""
    if log:
        return math.log10(min(values)) - 0.3, math.log10(max(values))
    return min([0.0, *values]), max([0.0, *values])


def _build_bar(
    series: int, label: str, value: float | None, stderr: float | None, scale: tuple[float, float], log: bool
) -> Bar:
    if value is None:
        return Bar(series, label, 0.0, 0.0, None, None, "")
    told = quantity(value, stderr)
    if not math.isfinite(value) or (log and not value) or scale[0] == scale[1]:
        return Bar(series, label, 0.0, 0.0, None, None, told)
    begin, end = (
        (0.0, _compute_position(value, scale, log))
        if log
        else sorted([_compute_position(0.0, scale, log), _compute_position(value, scale, log)])
    )
    low, high = _place_interval(value, stderr, scale, log) if stderr and math.isfinite(stderr) else (None, None)
    return Bar(series, label, round(begin, 2), round(max(end - begin, 0.4), 2), low, high, told)


def _place_interval(value: float, stderr: float, scale: tuple[float, float], log: bool) -> tuple[float, float]:
    low, high = (round(_compute_position(end, scale, log), 2) for end in _compute_interval_ends(value, stderr))
    return low, high


def _compute_interval_ends(value: float | None, stderr: float | None) -> list[float]:
    """Return the ends of the 95 % interval; none where unknown."""
    if value is None or not stderr or not math.isfinite(value) or not math.isfinite(stderr):
        return []
    return [value - 1.96 * stderr, value + 1.96 * stderr]


def _compute_position(value: float, scale: tuple[float, float], log: bool) -> float:
    if log and value <= 0:
        return 0.0
    # Halved, so that the span of the largest floats does not overflow.
    low, high = scale[0] / 2, scale[1] / 2
    at = (math.log10(value) if log else value) / 2
    return max(0.0, min(100.0, 100 * (at - low) / (high - low)))
