"""Plot readings, comparisons and training histories."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.errors import import_optional
from saltflat.integrations.record import EDGE_NAME, THRESHOLD_NAME, Record, strip_prefix
from saltflat.render.report import collect_layers, find_main_layers
from saltflat.results.report import Reading
from saltflat.results.text import format_quantity, make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saltflat.results.comparison import Contrast


ACROSS = 3
MOST_LAYERS = 30
LONGEST_NAME = 26
NETWORK = "network"
BEYOND = 1.5  # times the outermost ratios: the farthest ends of the axis
WIDE = 5.0  # ratio of the ends of an axis above which it is logarithmic


def draw_readings(panels: Mapping[str, Mapping[str, Reading]], title: str) -> Figure:
    """Return a Figure with a panel per measure, each with readings by label; a single label is not shown.

    It is made without pyplot, so that there is no window and nothing to close.
    """
    figures = import_optional("matplotlib.figure", "plot()")
    # Measures with layers need tall panels, others flat ones: a row holds panels of one kind.
    tall = [name for name, series in panels.items() if collect_layers(series.values())]
    flat = [name for name in panels if name not in tall]
    rows = [names[i : i + ACROSS] for names in (tall, flat) for i in range(0, len(names), ACROSS)]
    heights = [max(_compute_panel_height(panels[name]) for name in row) for row in rows]
    across = max((len(row) for row in rows), default=1)
    figure: Figure = figures.Figure(figsize=(max(4.6 * across, 6), sum(heights) + 0.6), layout="constrained")
    figure.suptitle(_truncate_start(make_printable(title), 100), parse_math=False)
    if not rows:
        figure.text(0.5, 0.4, "Nothing was measured.", ha="center")
        return figure
    # A report has the same color in all panels, even where others are missing.
    labels = dict.fromkeys(label for series in panels.values() for label in series)
    colors = {label: f"C{index}" for index, label in enumerate(labels)}
    grid = figure.add_gridspec(len(rows), across, height_ratios=heights)
    axes = [figure.add_subplot(grid[i, j]) for i, row in enumerate(rows) for j in range(len(row))]
    for axis, name in zip(axes, [name for row in rows for name in row], strict=True):
        _draw_panel(axis, name, panels[name], colors)
    if len(labels) > 1:
        patch = import_optional("matplotlib.patches", "plot()").Patch
        handles = [patch(color=color, label=_truncate_start(make_printable(label))) for label, color in colors.items()]
        for text in figure.legend(handles=handles, loc="outside lower center", ncols=min(len(labels), 6)).get_texts():
            text.set_parse_math(False)
    return figure


def _find_bar_layers(series: Mapping[str, Reading]) -> list[str]:
    readings = list(series.values())
    return find_main_layers(readings, collect_layers(readings), MOST_LAYERS) or [NETWORK]


def _compute_panel_height(series: Mapping[str, Reading]) -> float:
    return 0.7 + 0.15 * len(series) + 0.2 * len(_find_bar_layers(series)) * (1 + 0.5 * (len(series) - 1))


def _draw_panel(axis: Axes, name: str, series: Mapping[str, Reading], colors: Mapping[str, str]) -> None:
    bars = _find_bar_layers(series)
    thick = 0.8 / len(series)
    drawn: list[tuple[float, float]] = []
    for index, (label, reading) in enumerate(series.items()):
        values, errors = _collect_bar_values(reading, bars)
        places = [place + (index + 0.5) * thick - 0.4 for place in range(len(bars))]
        seen = [value if math.isfinite(value) else 0.0 for value in values]
        axis.barh(places, seen, thick * 0.95, color=colors[label])
        spread = [(p, v, e) for p, v, e in zip(places, seen, errors, strict=True) if e > 0]
        if spread:
            heights, centers, widths = zip(*spread, strict=True)
            axis.errorbar(centers, heights, xerr=widths, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        for place, value in zip(places, values, strict=True):
            if not math.isfinite(value):
                word = "undefined" if math.isnan(value) else "infinite"
                axis.annotate(word, (0.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=7)
        drawn += [(value, error) for value, error in zip(seen, errors, strict=True) if value]
    _set_axis_scale(axis, drawn)
    axis.set_yticks(
        range(len(bars)), [_truncate_start(make_printable(each)) for each in bars], fontsize=8, parse_math=False
    )
    axis.set_ylim(len(bars) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(y=0.02)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(_format_panel_title(name, series, len(bars)), fontsize=9, loc="left", parse_math=False)


def _set_axis_scale(axis: Axes, drawn: Sequence[tuple[float, float]]) -> None:
    """Make the axis logarithmic where values are positive and span more than two decades; zeros have no bar then."""
    values = [value for value, _ in drawn]
    if not values:
        axis.set_xticks([])
    elif min(values) > 0 and math.log10(max(values)) - math.log10(min(values)) > 2:
        axis.set_xscale("log", nonpositive="clip")
        axis.set_xlim(min(values) / 3, max(value + error for value, error in drawn) * 1.5)


def _collect_bar_values(reading: Reading, bars: Sequence[str]) -> tuple[list[float], list[float]]:
    if reading.layers:
        values = [reading.layers.get(layer, 0.0) for layer in bars]
        errors = [reading.layer_stderr.get(layer, 0.0) for layer in bars]
    else:
        values = [reading.value if bar == NETWORK else 0.0 for bar in bars]
        errors = [(reading.stderr or 0.0) if bar == NETWORK else 0.0 for bar in bars]
    kept = [
        error if math.isfinite(error) and math.isfinite(value) else 0.0
        for value, error in zip(values, errors, strict=True)
    ]
    return values, [1.96 * error for error in kept]


def _format_panel_title(name: str, series: Mapping[str, Reading], bars: int) -> str:
    lines = [make_printable(name)]
    for label, reading in series.items():
        lines.append(
            f"{_truncate_start(make_printable(label), 20)} {format_quantity(reading.value, reading.stderr)}".strip()
        )
    layers = len(collect_layers(series.values()))
    if layers > bars:
        lines.append(f"the {bars} largest of {layers} layers")
    return "\n".join(lines)


def _truncate_start(name: str, longest: int = LONGEST_NAME) -> str:
    """Return the end of a long name, which distinguishes layers."""
    return name if len(name) <= longest else "..." + name[3 - longest :]


def draw_ratios(contrasts: Sequence[Contrast], labels: Sequence[str], title: str) -> Figure:
    """Plot the ratio of every report to the first, with the 99 % interval of the verdicts, in a row per measure.

    Logarithmic measures, which have no ratio, and values undefined or zero in the first report are left out.
    """
    figures = import_optional("matplotlib.figure", "plot()")
    shown = [each for each in contrasts if any(_has_ratio(each, label) for label in each.verdicts)]
    figure: Figure = figures.Figure(figsize=(7.5, 1.3 + 0.28 * max(len(shown), 1)), layout="constrained")
    axis = figure.add_subplot()
    axis.axvline(1.0, color="0.6", linewidth=1)
    thick = 0.6 / max(1, len(labels) - 1)
    ratios, ends = [1.0], [1.0]
    for place, each in enumerate(shown):
        for label in [label for label in each.verdicts if _has_ratio(each, label)]:
            index = list(labels).index(label)
            ratio, interval = each.ratios[label], each.compute_ratio_interval(label)
            width = None if interval is None else interval[1] - ratio
            ratios.append(ratio)
            ends += interval or ()
            axis.errorbar(
                ratio,
                place + (index - len(labels) / 2) * thick,
                xerr=width,
                fmt="o",
                markersize=4,
                capsize=2,
                color=f"C{index}",
                # Without a known error the place is all there is to see.
                fillstyle="none" if width is None else "full",
            )
    names = [f"{make_printable(each.name)}{'' if 'unit_scale' in each.invariant_to else ' *'}" for each in shown]
    axis.set_yticks(range(len(shown)), names, fontsize=8, parse_math=False)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    if shown:
        # One wide interval would hide all others: it runs out of the figure instead.
        low, high = min(ratios) / BEYOND, max(ratios) * BEYOND
        low, high = max(low, min(ends)), min(high, max(ends))
        if high > WIDE * low:
            axis.set_xscale("log", nonpositive="clip")
            ticks = import_optional("matplotlib.ticker", "plot()")
            axis.xaxis.set_major_locator(ticks.LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(ticks.NullLocator())
            axis.set_xlim(low / 1.1, high * 1.1)
        else:
            margin = 0.05 * (high - low) or 0.05
            axis.set_xlim(low - margin, high + margin)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "\n".join(textwrap.wrap(make_printable(title), 95)), fontsize=9, x=0.01, ha="left", parse_math=False
    )
    axis.set_xlabel(
        f"ratio to {_truncate_start(make_printable(labels[0]))}, 99 % interval (* rescaling can change it)", fontsize=8
    )
    patch = import_optional("matplotlib.patches", "plot()").Patch
    handles = [
        patch(color=f"C{i}", label=_truncate_start(make_printable(label))) for i, label in enumerate(labels) if i
    ]
    for text in axis.legend(handles=handles, fontsize=8).get_texts():
        text.set_parse_math(False)
    return figure


def _has_ratio(contrast: Contrast, label: str) -> bool:
    value = contrast.ratios[label]
    return math.isfinite(value) and value > 0 and not contrast.logarithmic


def plot_history(history: Sequence[Record]) -> Figure:
    """Return a Figure with a panel for every value of the whole network, and a line per layer in that panel.

    It is made without pyplot, so that there is no window and nothing to close.
    """
    names = list(dict.fromkeys(name for record in history for name in record.values))
    panels = [name for name in names if "/" not in strip_prefix(name) and strip_prefix(name) != THRESHOLD_NAME]
    across, down = min(ACROSS, max(1, len(panels))), max(1, -(-len(panels) // ACROSS))
    figure: Figure = import_optional("matplotlib.figure", "plot()").Figure(
        figsize=(4 * across, 2.6 * down), layout="constrained"
    )
    if not panels:
        figure.text(0.5, 0.5, "Nothing was measured yet.", ha="center")
    for place, panel in enumerate(panels):
        axis = figure.add_subplot(down, across, place + 1)
        axis.set_title(make_printable(strip_prefix(panel)), fontsize=9, parse_math=False)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        for name in names:
            if name.startswith(f"{panel}/"):
                _plot_line(axis, history, name, color="0.75", linewidth=0.8)
        _plot_line(axis, history, panel, color="C0", marker=".", linewidth=1.2)
        threshold = panel.replace(EDGE_NAME, THRESHOLD_NAME)
        if strip_prefix(panel) == EDGE_NAME and threshold in names:
            _plot_line(axis, history, threshold, color="C3", linestyle="--", linewidth=1)
    return figure


def _plot_line(axis: Axes, history: Sequence[Record], name: str, **style: Any) -> None:
    points = [(record.step, record.values[name]) for record in history if name in record.values]
    axis.plot(*zip(*points, strict=True), **style)
