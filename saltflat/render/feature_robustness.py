"""Render the feature robustness of a layer in words and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.errors import import_optional
from saltflat.render.report import render_html_table, render_paragraph, wrap_html
from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    format_count,
    format_number,
    format_quantity,
    format_short,
    make_printable,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saltflat.bounds.robustness_result import FeatureRobustness, RobustnessPoint


class FeatureRobustnessRenderable:
    """Rich renderable of a feature robustness."""

    def __init__(self, found: FeatureRobustness) -> None:
        self.found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(make_printable(self.found.model), style="bold")
        yield Text(" | ".join(format_robustness_facts(self.found)) + "\n")
        for header, lines in make_robustness_tables(self.found):
            table = build_ruled_table(header[0])
            for column in header[1:]:
                add_number_column(table, column)
            for line in lines:
                table.add_row(*map(Text, line))
            yield table
            yield Text("")
        for said in format_robustness_notes(self.found):
            yield Text(said)


def format_feature_robustness_html(found: FeatureRobustness) -> str:
    """Return the feature robustness as HTML."""
    parts = [
        render_paragraph(found.model),
        render_paragraph(" | ".join(format_robustness_facts(found))),
        *(render_html_table(header, lines, [""] * len(lines)) for header, lines in make_robustness_tables(found)),
        *map(render_paragraph, format_robustness_notes(found)),
    ]
    return wrap_html(parts)


def format_robustness_facts(found: FeatureRobustness) -> list[str]:
    """Return what was computed, and how, as the parts of a line."""
    each = " in each" if found.groups > 1 else ""
    said = [f"{found.layer}, {format_count(found.features, 'feature')}{each}"]
    if found.groups > 1:
        said.append(format_count(found.groups, "group"))
    said += [
        format_count(found.examples, "example"),
        f"loss {format_number(found.loss)} ({found.settings.get('loss')})",
    ]
    said += [str(found.settings.get(key)) for key in ("dtype", "device")] + [f"{format_number(found.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def make_robustness_tables(found: FeatureRobustness) -> list[tuple[list[str], list[list[str]]]]:
    """Return the headers and rows of two tables: the largest rises, and means and single examples."""
    has_given, has_worst = (any(getattr(p, key) is not None for p in found.points) for key in ("given", "worst"))
    largest = ["delta", "largest found", "bound", "first order", "bound applies"] + ["given A"] * has_given
    means = ["delta", "orthogonal", "+-", "2nd order", "predicted"] + [
        "worst example",
        "its number",
        "mean of worst",
    ] * has_worst
    return [
        (largest, [_format_largest(point)[: len(largest)] for point in found.points]),
        (means, [_format_means(point)[: len(means)] for point in found.points]),
    ]


def _format_largest(point: RobustnessPoint) -> list[str]:
    cells = [_format_rise(each) for each in (point.delta, point.largest, point.bound, point.first_order)]
    return [*cells, "yes" if point.applies else "no", _format_rise(point.given)]


def _format_means(point: RobustnessPoint) -> list[str]:
    cells = [_format_rise(point.delta), _format_rise(point.orthogonal), _format_rise(1.96 * point.orthogonal_stderr, 2)]
    place = "" if point.worst_example is None else str(point.worst_example)
    cells += [_format_rise(point.second_order), _format_rise(point.predicted)]
    return [*cells, _format_rise(point.worst), place, _format_rise(point.mean_worst)]


def _format_rise(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return format_short(value, digits) if math.isfinite(value) else format_number(value)


def format_robustness_notes(found: FeatureRobustness) -> list[str]:
    """Return lines on what the bounds are made of, and the notes."""
    trace = format_quantity(found.kappa_trace, found.squared_norm * found.hessian_trace_stderr or None)
    pairs = format_quantity(found.relative_flatness, found.relative_flatness_stderr or None)
    said = [
        "Largest: the rise of the mean loss over all A that were tried. Orthogonal: its mean over random orthogonal A, "
        "with a 95 % interval, and the second-order rise of the same A.",
        f"kappa {format_number(found.kappa)} = |w|^2 {format_number(found.squared_norm)} * largest eigenvalue "
        f"{format_number(found.top_eigenvalue)}; bound = delta^2 / 2 * kappa, for A of {found.norm} norm at most 1.",
        f"Predicted for orthogonal A: delta^2 / (2 * {found.features}) * {pairs}; at a minimum at most that of "
        f"kappa_trace, {trace}.",
    ]
    if any(point.worst is not None for point in found.points):
        said.append(
            "Worst: the largest rise found for a single example's loss when its own features change by delta times "
            "their length. The mean hides it."
        )
    return [make_printable(each) for each in (*said, *(f"Note: {note}" for note in found.notes))]


# Distinguishable without colors, too (Okabe and Ito).
LARGEST, BOUND, FIRST, ORTHOGONAL, WORST, GIVEN = "#0072b2", "#000000", "#777777", "#009e73", "#d55e00", "#cc79a7"


def plot_feature_robustness(found: FeatureRobustness) -> Figure:
    """Return a Figure, made without pyplot, so that there is no window and nothing to close."""
    figure: Figure = import_optional("matplotlib.figure", "plot()").Figure(figsize=(6.4, 4.4), layout="constrained")
    axis = figure.add_subplot()
    axis.set_xscale("log")
    axis.set_yscale("log")
    points = found.points
    _draw_line(axis, points, [p.bound for p in points], "bound, delta² kappa / 2", BOUND, "--")
    _draw_line(axis, points, [p.first_order for p in points], "largest, first order", FIRST, ":")
    _draw_line(axis, points, [p.largest for p in points], "largest found", LARGEST, "o-")
    _draw_line(axis, points, [p.predicted for p in points], "orthogonal, predicted", ORTHOGONAL, "--")
    _draw_mean(axis, points)
    for key, label, color, style in (("given", "given A", GIVEN, "v-"), ("worst", "worst example", WORST, "^-")):
        _draw_line(
            axis, points, [math.nan if (v := getattr(p, key)) is None else v for p in points], label, color, style
        )
    axis.set_title(f"{make_printable(found.layer)} in {make_printable(found.model)}", fontsize=10, parse_math=False)
    axis.set_xlabel("delta, the relative change of the features", fontsize=10)
    axis.set_ylabel("rise of the loss", fontsize=10)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.has_data():
        axis.legend(frameon=False, fontsize=8)
    else:
        axis.annotate("No rise is positive.", (0.5, 0.5), xycoords="axes fraction", ha="center")
    return figure


def _draw_line(
    axis: Axes, points: Sequence[RobustnessPoint], values: Sequence[float], label: str, color: str, style: str
) -> None:
    """Draw the values that a logarithmic axis can show."""
    pairs = [(p.delta, value) for p, value in zip(points, values, strict=True) if 0 < value < math.inf]
    if pairs:
        axis.plot(*zip(*pairs, strict=True), style, color=color, linewidth=1.3, markersize=4, label=label)


def _draw_mean(axis: Axes, points: Sequence[RobustnessPoint]) -> None:
    shown = [p for p in points if 0 < p.orthogonal < math.inf]
    if not shown:
        return
    deltas, means = [p.delta for p in shown], [p.orthogonal for p in shown]
    errors = [1.96 * p.orthogonal_stderr for p in shown]
    # An interval that reaches zero has no lower end on this axis.
    low = [max(mean - error, mean / 1e3) for mean, error in zip(means, errors, strict=True)]
    high = [mean + error for mean, error in zip(means, errors, strict=True)]
    axis.fill_between(deltas, low, high, color=ORTHOGONAL, alpha=0.25, linewidth=0)
    axis.plot(deltas, means, "s-", color=ORTHOGONAL, linewidth=1.3, markersize=4, label="orthogonal, mean and 95 %")
