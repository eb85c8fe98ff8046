"""Plot the effects of one setting as its table has them: ratios of measures and losses, and differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saltflat.errors import import_optional
from saltflat.results.text import format_count, format_factor, make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saltflat.studies.effects.results import AxisEffects, Change, Effects, Quantity


# Distinguishable for most readers; beyond these a color scale says more.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#4d4d4d")
SHAPES = "oDs^vP"
LONGEST_NAME = 34
ROW, LINE = 0.16, 0.13  # inches: between rows, and of each value in a row
LEAST_HEIGHT = 2.6
BEYOND = 10.0  # times the outermost ratios: the farthest ends of the axis
LEAST_DECADES = 0.15
TITLES = {"loss": "loss, difference", "error": "error, difference"}


def draw_effects(effects: Effects, axis: str) -> Figure:
    """Return a Figure with a row per quantity and a mark per value, made without pyplot: there is nothing to close.

    Ratios are on the left, on a logarithmic axis; measures without one are in the table alone. Differences of losses
    and errors that have no ratio are on the right. A mark is filled if its interval does not contain the reference.

    Args:
        effects: the effects of a study.
        axis: the name of the setting.
    """
    figures = import_optional("matplotlib.figure", "plot()")
    own = effects[axis]
    left = [each for each in effects.quantities.values() if each.has_ratio]
    right = [
        [each for each in effects.quantities.values() if each.kind == kind and not each.has_ratio] for kind in TITLES
    ]
    step = ROW + LINE * len(own.others)
    height = max(LEAST_HEIGHT, 1.4 + step * max(len(left), 6))
    figure: Figure = figures.Figure(figsize=(10.5, height), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=[len(found) + 1 for found in right])
    without = [name for name, each in effects.quantities.items() if each.kind == "measure" and not each.has_ratio]
    _draw_measures(figure.add_subplot(grid[:, 0]), own, left, without)
    for place, found in enumerate(right):
        panel = figure.add_subplot(grid[place, 1])
        _draw_rows(panel, own, found, ratios=False)
        panel.set_title(TITLES[found[0].kind], fontsize=9, loc="left")
        panel.tick_params(axis="x", labelsize=8)
        panel.locator_params(axis="x", nbins=5)
    _draw_legend(figure, own)
    title = f"{own.name}, compared with {own.describe(own.base)}: the same other settings and seed, 95 % intervals"
    figure.suptitle(make_printable(title), fontsize=11, x=0.01, ha="left", parse_math=False)
    return figure


def _draw_measures(panel: Axes, own: AxisEffects, shown: Sequence[Quantity], without: Sequence[str]) -> None:
    panel.set_title("measures and losses, ratio", fontsize=9, loc="left")
    if not shown:
        panel.set_axis_off()
        panel.text(0.5, 0.5, "Nothing has a ratio.", ha="center", transform=panel.transAxes)
        return
    _draw_rows(panel, own, shown, ratios=True)
    changes = [value.changes[each.name] for value in own.others for each in shown]
    low, high = _compute_limits(changes)
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    ticks = import_optional("matplotlib.ticker", "plot()")
    decades = math.log10(high / low)
    if decades < 5:
        few, more = (1.0, 2.0, 5.0), (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0)
        subs = (1.0,) if decades > 3 else few if decades > 1 else more
        panel.xaxis.set_major_locator(ticks.LogLocator(subs=subs))
        panel.xaxis.set_major_formatter(ticks.FuncFormatter(lambda value, _: format_factor(value)))
    panel.xaxis.set_minor_locator(ticks.NullLocator())
    panel.tick_params(axis="x", labelsize=8)
    label = "smaller than the reference  <  1  <  larger"
    if not all(each.is_invariant for each in shown if each.kind == "measure"):
        label += "      (\N{DAGGER} rescaling can change it)"
    if without:
        label += f"\nwithout a ratio, in the table only: {make_printable(', '.join(without))}"
    panel.set_xlabel(label, fontsize=8, parse_math=False)


def _compute_limits(changes: Sequence[Change]) -> tuple[float, float]:
    """Return the ends of the axis of ratios: a very wide interval runs out of the figure instead of hiding others."""
    estimates = [each.ratio for each in changes if each.ratio is not None]
    values = [each.value for each in estimates if 0 < each.value < math.inf]
    ends = [end for each in estimates for end in (each.low, each.high) if 0 < end < math.inf]
    low, high = min([1.0, *values]), max([1.0, *values])
    low, high = max(low / BEYOND, min([low, *ends])), min(high * BEYOND, max([high, *ends]))
    margin = 10 ** max(0.04 * math.log10(high / low), LEAST_DECADES / 2)
    return low / margin, high * margin


def _draw_rows(panel: Axes, own: AxisEffects, shown: Sequence[Quantity], ratios: bool) -> None:
    """Draw a mark with its interval for each quantity and value."""
    neutral = 1.0 if ratios else 0.0
    panel.axvline(neutral, color="0.6", linewidth=1)
    thick = LINE / (ROW + LINE * len(own.others))
    for row, quantity in enumerate(shown):
        if row % 2:
            panel.axhspan(row - 0.5, row + 0.5, color="0.96", zorder=0)
        for index, value in enumerate(own.others):
            change = value.changes[quantity.name]
            estimate = change.ratio if ratios else change.difference
            if estimate is None or not math.isfinite(estimate.value):
                continue
            place = row + (index - (len(own.others) - 1) / 2) * thick
            style = _get_style(index, len(own.others))
            if estimate.has_interval:
                panel.plot([estimate.low, estimate.high], [place, place], color=style["color"], linewidth=1.2)
            is_clear = estimate.has_interval and not estimate.low <= neutral <= estimate.high
            face = style["color"] if is_clear else "white"
            panel.plot([estimate.value], [place], markersize=4.5, markerfacecolor=face, linestyle="none", **style)
    names = [_format_row_name(each) for each in shown]
    panel.set_yticks(range(len(shown)), names, fontsize=8, parse_math=False)
    panel.set_ylim(len(shown) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right"]].set_visible(False)


def _format_row_name(quantity: Quantity) -> str:
    name = make_printable(quantity.name)
    short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."
    return f"{short} \N{DAGGER}" if quantity.kind == "measure" and not quantity.is_invariant else short


def _get_style(index: int, count: int) -> dict[str, Any]:
    """Return color and shape of the marks of a value; of many values the colors are a scale."""
    if count <= len(COLORS):
        return {"color": COLORS[index], "marker": SHAPES[index]}
    scale = import_optional("matplotlib", "plot()").colormaps["viridis"]
    return {"color": scale(0.92 * index / (count - 1)), "marker": "o"}


def _draw_legend(figure: Figure, own: AxisEffects) -> None:
    line = import_optional("matplotlib.lines", "plot()").Line2D
    handles = [
        line([], [], label=_format_legend_label(own.describe(each), each.pairs), **_get_style(index, len(own.others)))
        for index, each in enumerate(own.others)
    ]
    handles.append(line([], [], color="0.4", marker="o", markerfacecolor="white", linestyle="none", label="unclear"))
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _format_legend_label(label: str, pairs: int) -> str:
    short = label if len(label) <= LONGEST_NAME else label[: LONGEST_NAME - 3] + "..."
    return f"{make_printable(short)} ({format_count(pairs, 'pair')})"
