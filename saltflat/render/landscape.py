"""Render a landscape in words and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.errors import OptionError, import_optional, make_unknown_name_error
from saltflat.landscape.directions import WORDS
from saltflat.render.report import render_html_table as html_table
from saltflat.render.report import render_paragraph, wrap_html
from saltflat.results.text import add_number_column, build_ruled_table, format_number, make_printable
from saltflat.validation import check_count, is_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from saltflat.landscape.result import Landscape


MaskedArray = np.ma.MaskedArray[tuple[int, ...], np.dtype[np.float64]]


HEADER = ("direction", "length", "curvature", "loss at one end", "and at the other")


class LandscapeRenderable:
    """Rich renderable of a landscape."""

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        landscape = self.landscape
        yield Text(make_printable(landscape.model), style="bold")
        yield Text(" | ".join(format_landscape_facts(landscape)) + "\n")
        table = build_ruled_table("direction")
        for column in HEADER[1:]:
            add_number_column(table, column)
        for row in make_landscape_rows(landscape):
            table.add_row(*map(Text, row))
        yield table
        yield Text("")
        for line in format_landscape_notes(landscape):
            yield Text(line)


def format_landscape_html(landscape: Landscape) -> str:
    """Return the landscape as HTML."""
    lines = make_landscape_rows(landscape)
    parts = [
        render_paragraph(landscape.model),
        render_paragraph(" | ".join(format_landscape_facts(landscape))),
        html_table(HEADER, lines, [WORDS.get(str(each["normalize"]), "") for each in landscape.directions]),
        *map(render_paragraph, format_landscape_notes(landscape)),
    ]
    return wrap_html(parts)


def format_landscape_facts(landscape: Landscape) -> list[str]:
    """Return what was computed, and how, as the parts of a line."""
    settings, size = landscape.settings, " x ".join(str(len(each)) for each in landscape.coordinates)
    error = [] if landscape.error is None else [f"error {landscape.error:.2%}"]
    said = [f"{size} points", f"{landscape.examples} example{'s' * (landscape.examples != 1)}"]
    said += [f"loss {format_number(landscape.loss)} ({settings.get('loss')})", *error, str(settings.get("dtype"))]
    said += [str(settings.get("device")), f"{format_number(landscape.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def make_landscape_rows(landscape: Landscape) -> list[list[str]]:
    """Return a row for each direction: the curvature in the middle, and the loss at both ends."""
    found = []
    for axis, (direction, bend) in enumerate(zip(landscape.directions, landscape.curvature, strict=True)):
        along = [len(each) // 2 for each in landscape.coordinates]
        ends = []
        for end in (0, -1):
            place = tuple(end if a == axis else n for a, n in enumerate(along))
            ends.append(f"{format_number(float(landscape.losses[place]))} at {landscape.coordinates[axis][end]:g}")
        found.append(
            [
                format_direction_name(direction, axis),
                format_number(float(direction["length"])),
                format_number(bend),
                *ends,
            ]
        )
    return found


def format_direction_name(direction: Mapping[str, Any], axis: int) -> str:
    """Return the name of a direction in tables and on axes.

    >>> format_direction_name({"kind": "eigenvector", "eigenvalue": 12.5, "normalize": "length"}, 0)
    'eigenvector 1 (eigenvalue 12.5)'
    """
    value = direction.get("eigenvalue")
    normalize = str(direction.get("normalize"))
    known = [] if value is None else [f"eigenvalue {format_number(float(value))}"]
    usual = "length" if direction["kind"] == "eigenvector" else "none"
    how = [] if normalize == usual else [f"by {normalize}"]
    word = {"random": "random direction", "given": "direction"}.get(str(direction["kind"]), str(direction["kind"]))
    told = f" ({', '.join([*known, *how])})" if known or how else ""
    return make_printable(f"{word} {axis + 1}{told}")


def format_landscape_notes(landscape: Landscape) -> list[str]:
    """Return lines on the lowest point and on overflow, and the notes."""
    losses, said = landscape.losses, []
    finite = np.isfinite(losses)
    lowest = np.unravel_index(np.argmin(np.where(finite, losses, np.inf)), losses.shape)
    if losses[lowest] < landscape.loss:
        where = ", ".join(f"{each[n]:g}" for each, n in zip(landscape.coordinates, lowest, strict=True))
        said.append(f"The lowest of these points is not the middle: {format_number(float(losses[lowest]))} at {where}.")
    if not finite.all():
        said.append(f"At {int((~finite).sum())} of {losses.size} points the loss is not finite.")
    return [make_printable(each) for each in (*said, *landscape.notes)]


WHAT = {"loss": "mean loss", "error": "fraction of wrong predictions"}
# Distinguishable without colors, too (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", "-.", ":")
MAP = "cividis"  # made for all kinds of color vision
TICKS = 8  # of the color bar, about
DECADES = 2  # above which a scale is logarithmic by default


def plot_landscape(landscape: Landscape, what: str = "loss", log: bool | None = None, levels: int = 20) -> Figure:
    """Return a Figure, made without pyplot, so that there is no window and nothing to close."""
    check_count(2, levels=levels)
    if landscape.dimensions == 1:
        return plot_together({"": landscape}, what, log)
    values = _select_values(landscape, what)
    figure: Figure = import_optional("matplotlib.figure", "plot()").Figure(figsize=(6.6, 5.2), layout="compressed")
    axis = figure.add_subplot()
    axis.set_title(make_printable(landscape.model), fontsize=10, parse_math=False)
    axis.set_xlabel(format_direction_name(landscape.directions[0], 0), parse_math=False)
    axis.set_ylabel(format_direction_name(landscape.directions[1], 1), parse_math=False)
    # Rows of an image go up, and the first direction to the right.
    across, up = landscape.coordinates
    seen = np.ma.masked_invalid(values.T)
    edges, norm = _compute_contour_levels(seen, log, levels)
    filled = axis.contourf(across, up, seen, levels=edges, norm=norm, cmap=MAP)
    axis.contour(across, up, seen, levels=edges, colors="black", linewidths=0.3, alpha=0.6)
    axis.plot([0], [0], "+", color="white", markersize=9, markeredgewidth=2.5)
    axis.plot([0], [0], "+", color="black", markersize=8, markeredgewidth=1)
    axis.set_aspect("equal")
    axis.set_facecolor("#dddddd")  # where the loss overflowed
    bar = figure.colorbar(filled, ax=axis, label=WHAT[what])
    shown = edges[:: max(1, len(edges) // TICKS)].tolist()
    bar.set_ticks(shown, labels=[format_number(each, 3) for each in shown], fontsize=8)
    bar.ax.minorticks_off()
    return figure


def plot_together(
    landscapes: Mapping[str, Landscape] | Sequence[Landscape], what: str = "loss", log: bool | None = None
) -> Figure:
    """Plot several one-dimensional landscapes; see :func:`saltflat.landscape.plot_together`."""
    named = (
        dict(landscapes) if isinstance(landscapes, Mapping) else {str(n): each for n, each in enumerate(landscapes, 1)}
    )
    if not named or any(each.dimensions != 1 for each in named.values()):
        got = "no landscapes" if not named else "a landscape of two dimensions"
        raise OptionError(
            f"Expected landscapes of one dimension, but got {got}. Try plotting maps one by one, with .plot()."
        )
    figure: Figure = import_optional("matplotlib.figure", "plot()").Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.add_subplot()
    for index, (name, each) in enumerate(named.items()):
        axis.plot(
            each.coordinates[0],
            np.ma.masked_invalid(_select_values(each, what)),
            LINES[index // len(COLORS) % len(LINES)] if index >= len(COLORS) else LINES[index % len(LINES)],
            color=COLORS[index % len(COLORS)],
            marker="." if len(each.coordinates[0]) <= 60 else None,
            label=make_printable(name),
        )
    every = np.concatenate([_select_values(each, what) for each in named.values()])
    if _is_logarithmic(np.ma.masked_invalid(every), log):
        axis.set_yscale("log", nonpositive="mask")
    axis.axvline(0, color="black", linewidth=0.6, zorder=0)
    directions = list(dict.fromkeys(format_direction_name(each.directions[0], 0) for each in named.values()))
    axis.set_xlabel(directions[0] if len(directions) == 1 else "distance along the direction", parse_math=False)
    axis.set_ylabel(WHAT[what])
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if list(named) == [""]:
        axis.set_title(make_printable(named[""].model), fontsize=10, parse_math=False)
    else:
        for text in axis.legend(frameon=False).get_texts():
            text.set_parse_math(False)
    return figure


def _select_values(landscape: Landscape, what: str) -> NDArray[np.float64]:
    if not is_choice(what, WHAT):
        raise make_unknown_name_error("quantity to plot", what, WHAT)
    if what == "loss":
        return landscape.losses
    if landscape.errors is None:
        raise OptionError(
            "Expected a landscape with errors, but got what='error' for one whose loss has no right or wrong. Try "
            "what='loss'."
        )
    return landscape.errors


def _is_logarithmic(seen: MaskedArray, log: bool | None) -> bool:
    """Return whether the scale is logarithmic; zeros and negative values have no logarithm."""
    positive = seen.count() > 0 and float(seen.min()) > 0
    if log is None:
        return bool(positive and np.log10(float(seen.max())) - np.log10(float(seen.min())) > DECADES)
    if not isinstance(log, bool):
        raise OptionError(f"Expected True, False or None, but got log={log!r}. Try leaving it out.")
    if log and not (seen > 0).any():
        raise OptionError(
            "Expected a positive value, but got log=True for values that are all 0 or negative. Try leaving log out."
        )
    return log


def _compute_contour_levels(seen: MaskedArray, log: bool | None, count: int) -> tuple[NDArray[np.float64], Any]:
    """Return the edges of the contours, and the norm of their colors."""
    colors = import_optional("matplotlib.colors", "plot()")
    if _is_logarithmic(seen, log):
        low, high = float(seen[seen > 0].min()), float(seen.max())
        high = high if high > low else 2 * low
        edges = np.geomspace(low, high, count + 1)
        edges[0], edges[-1] = low, high
        return edges, colors.LogNorm(low, high)
    low, high = float(seen.min()), float(seen.max())
    if not high > low:  # flat: one level around it
        low, high = low - 0.5 * max(abs(low), 1.0), high + 0.5 * max(abs(high), 1.0)
    return np.linspace(low, high, count + 1), colors.Normalize(low, high)
