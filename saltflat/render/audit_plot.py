"""Plot an audit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.audit.change import BROKEN, STAYS, UNDEFINED, UNMEASURED
from saltflat.errors import import_optional
from saltflat.render.audit import KINDS, format_missing_rescalings, sort_measures
from saltflat.results.text import make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saltflat.audit.result import Audit, AuditLine


# Distinguishable without colors, too.
COLORS = {"layer": "#0072b2", "unit": "#d55e00"}
SHAPES = {"layer": "o", "unit": "D"}
WRONG, BAND, FAINT = "#b00020", "#eef3f1", "#8a8a8a"
LONGEST_NAME = 44
ROW = 0.25  # inches
LEAST_ROWS = 4  # so that titles and legends have room
FEW_DECADES = 3.0  # up to here, ticks are plain numbers
LEAST_DECADES = 0.5  # from the line at 1 to the edges of the axis


def draw_audit(audit: Audit) -> Figure:
    """Return a Figure, made without pyplot, so that there is no window and nothing to close."""
    figures = import_optional("matplotlib.figure", "plot()")
    names = sort_measures(audit)
    kinds = list(dict.fromkeys(kind for line in audit.values() for kind in line.changes))
    figure: Figure = figures.Figure(figsize=(9.5, ROW * max(len(names), LEAST_ROWS) + 1.9), layout="constrained")
    many = "rescaling" + "s" * (audit.draws != 1)
    title = f"{audit.report.model}: {audit.draws} {many} of each kind, the same function"
    if not kinds:
        figure.suptitle(make_printable(audit.report.model), parse_math=False)
        told = " ".join(format_missing_rescalings(audit)) if names else "Nothing was measured."
        figure.text(0.5, 0.4, make_printable(told), ha="center", wrap=True, parse_math=False)
        return figure
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.08)
    figure.suptitle(make_printable(title), fontsize=11, parse_math=False)
    axis = figure.add_subplot()
    # Differences of logarithms may span hundreds of decades: they set the axis only if there is nothing else.
    plain = [name for name in names if not audit[name].logarithmic] or names
    edges = _compute_axis_limits(audit[name].compute_draw_decades(kind) for name in plain for kind in kinds)
    for row, name in enumerate(names):
        _draw_row(axis, row, audit[name], kinds, edges)
    _draw_axis(axis, [audit[name] for name in names], names, edges)
    _draw_claims(axis, [audit[name] for name in names], kinds)
    _draw_legend(figure, audit, kinds)
    return figure


def _compute_axis_limits(decades: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the ends of the axis, in powers of ten."""
    found = [each for draws in decades for each in draws if math.isfinite(each)]
    low, high = min(found, default=0.0), max(found, default=0.0)
    room = 0.04 * (high - low)
    return min(low - room, -LEAST_DECADES), max(high + room, LEAST_DECADES)


def _draw_row(axis: Axes, row: int, line: AuditLine, kinds: Sequence[str], edges: tuple[float, float]) -> None:
    if line.claims:
        axis.axhspan(row - 0.5, row + 0.5, color=BAND, linewidth=0, zorder=0)
    shift = 0.4 / len(kinds)
    for index, kind in enumerate(kinds):
        place = row + (2 * index - len(kinds) + 1) * shift / 2
        color = COLORS.get(kind, "black")
        decades = line.compute_draw_decades(kind)
        inside = [each for each in decades if edges[0] <= each <= edges[1]]
        axis.plot(
            inside,
            [place] * len(inside),
            SHAPES.get(kind, "s"),
            color=color,
            markersize=4.5 if SHAPES.get(kind) == "o" else 3.8,
            alpha=0.55,
            markeredgewidth=0,
            zorder=3,
        )
        # What lies beyond the axis is shown at its edge.
        for edge, shape, beyond in (
            (edges[0], "<", any(each < edges[0] for each in decades)),
            (edges[1], ">", any(each > edges[1] for each in decades)),
        ):
            if beyond:
                axis.plot([edge], [place], shape, color=color, markersize=6, clip_on=False, zorder=4)
    lost = _format_lost_draws(line)
    if lost:
        axis.text(edges[1], row, f"{lost}  ", fontsize=7, ha="right", va="center", color=FAINT, zorder=4)


def _format_lost_draws(line: AuditLine) -> str:
    """Return why a row has fewer dots than draws."""
    if set(line.verdicts.values()) <= {UNDEFINED, UNMEASURED}:
        return ", ".join(dict.fromkeys(line.verdicts.values()))
    count = sum(math.isnan(each) for kind in line.changes for each in line.compute_draw_decades(kind))
    return f"{count} draw{'s' * (count != 1)} undefined or of another sign" if count else ""


def _draw_axis(axis: Axes, lines: Sequence[AuditLine], names: Sequence[str], edges: tuple[float, float]) -> None:
    tickers = import_optional("matplotlib.ticker", "plot()")
    axis.axvline(0, color="black", linewidth=0.8, zorder=2)
    axis.set_xlim(*edges)
    axis.set_ylim(len(names) - 0.5, -0.5)
    if edges[1] - edges[0] > FEW_DECADES:
        axis.xaxis.set_major_locator(tickers.MaxNLocator(9, integer=True))
        axis.xaxis.set_major_formatter(tickers.FuncFormatter(_format_power_tick))
    else:
        plain = _compute_plain_ticks(edges)
        axis.set_xticks([math.log10(each) for each in plain], [f"{each:g}" for each in plain])
    axis.set_xlabel("value after the rescaling / value before", fontsize=9)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=1)
    axis.set_axisbelow(True)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    labels = [
        _truncate_end(make_printable(name)) + (" (e^difference)" if line.logarithmic else "")
        for name, line in zip(names, lines, strict=True)
    ]
    axis.set_yticks(range(len(names)), labels, fontsize=8, parse_math=False)
    for label, line in zip(axis.get_yticklabels(), lines, strict=True):
        if BROKEN in line.verdicts.values():
            label.set(color=WRONG, fontweight="bold")
        elif line.claims:
            label.set_fontweight("bold")


def _compute_plain_ticks(edges: tuple[float, float]) -> list[float]:
    """Return 1, 2, 5, 10 and so on, in both directions, as far as the axis goes.

    Example:
        >>> _compute_plain_ticks((-0.5, 0.5))
        [0.5, 1.0, 2.0]
    """
    decades = range(math.floor(edges[0]), math.ceil(edges[1]) + 1)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if edges[0] <= math.log10(tick) <= edges[1]]


def _format_power_tick(decade: float, _: int) -> str:
    return "1" if decade == 0 else f"$10^{{{decade:g}}}$"


def _draw_claims(axis: Axes, lines: Sequence[AuditLine], kinds: Sequence[str]) -> None:
    """Draw a column per kind beside the rows: what is claimed, and whether it held."""
    across = axis.get_yaxis_transform()  # a part of the axis' width, and a row
    for index, kind in enumerate(kinds):
        place = 1.035 + 0.055 * index
        _draw_header(axis, kind, place, 3, COLORS.get(kind, "black"))
        for row, line in enumerate(lines):
            change = line.changes.get(kind)
            if change is None or not change.claimed:
                continue
            broken, held = change.verdict == BROKEN, change.verdict == STAYS
            axis.plot(
                [place],
                [row],
                "X" if broken else "s",
                transform=across,
                color=WRONG if broken else COLORS.get(kind, "black"),
                fillstyle="full" if broken or held else "none",
                markersize=7 if broken else 5,
                clip_on=False,
            )
    _draw_header(axis, "claims", 1.035 + 0.0275 * (len(kinds) - 1), 13, "black")


def _draw_header(axis: Axes, text: str, place: float, above: float, color: str) -> None:
    """Draw a header some points above the axis, whatever the number of rows."""
    axis.annotate(
        text,
        (place, 1),
        xycoords="axes fraction",
        xytext=(0, above),
        textcoords="offset points",
        fontsize=7.5,
        ha="center",
        va="bottom",
        color=color,
        annotation_clip=False,
    )


def _draw_legend(figure: Figure, audit: Audit, kinds: Sequence[str]) -> None:
    line = import_optional("matplotlib.lines", "plot()").Line2D
    handles = [
        line(
            [],
            [],
            linestyle="none",
            marker=SHAPES.get(kind, "s"),
            color=COLORS.get(kind, "black"),
            markersize=5,
            label=f"a draw {KINDS.get(kind, kind)} ({audit.scales[kind]} scale{'s' * (audit.scales[kind] != 1)})",
        )
        for kind in kinds
    ]
    verdicts = {verdict for each in audit.values() for verdict in each.verdicts.values()}
    if STAYS in verdicts:
        handles.append(
            line([], [], linestyle="none", marker="s", color="#444444", markersize=5, label="claims to stay, and does")
        )
    if BROKEN in verdicts:
        handles.append(
            line([], [], linestyle="none", marker="X", color=WRONG, markersize=7, label="claims to stay, and MOVES")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _truncate_end(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."
