"""Render how much of each order of networks survives each change, as sentences, text tables and a plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from saltflat.errors import import_optional
from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    can_fit,
    fold_name,
    format_count,
    join_words,
    make_printable,
)
from saltflat.studies.fragility.results import LESS, MORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from saltflat.studies.effects.results import Estimate
    from saltflat.studies.fragility.results import Fragility, ShiftSurvival, Survival

WIDEST = 26
NAMES = {"gap_error": "gap of the error", "gap_loss": "gap of the loss"}
MARKS = {LESS: " -", MORE: " +"}
LEGEND = "-, +: clearly less or more than the gap's. Each is one comparison; nothing is corrected for their number."
BLUE, RED, GRAY = "#0072b2", "#d55e00", "0.45"


class FragilityTables:
    """Rich renderable of fragility: a row per measure, a column per change, in as many tables as the width requires."""

    def __init__(self, fragility: Fragility) -> None:
        self.fragility = fragility

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self.fragility
        facts = [format_count(found.runs, "run"), *(f"left out: {n} {why}" for why, n in found.left_out.items())]
        yield Text(make_printable(" | ".join(facts)) + "\n")
        for shift in found.shifts.values():
            yield Text(make_printable(f"* {format_answer(found, shift)}"))
        yield Text("")
        rest = list(found.shifts.values())
        while rest:
            count = 1
            while count < len(rest) and can_fit(self._render_table(rest[: count + 1]), console, options):
                count += 1
            yield self._render_table(rest[:count])
            yield Text("")
            rest = rest[count:]
        for line in [*([LEGEND] if found.shifts else []), *found.notes]:
            yield Text(make_printable(line))
        for warning in found.warnings:
            yield Text(make_printable(f"Warning: {warning}"), style="bold")

    def _render_table(self, shifts: list[ShiftSurvival]) -> Table:
        table = build_ruled_table("tau-b, 95 %")
        for shift in shifts:
            add_number_column(table, f"{make_printable(shift.name)}\n{format_count(shift.configurations, 'config')}")
        kind = None
        for name, quantity in self.fragility.quantities.items():
            if kind is not None and quantity.kind != kind:
                table.add_row("")
            kind = quantity.kind
            cells = [format_survival(shift.survivals[name]) for shift in shifts]
            table.add_row(*map(Text, [fold_name(NAMES.get(name, name), WIDEST), *cells]))
        return table


def format_survival(survival: Survival) -> str:
    """Format tau-b with its interval and a mark, ``0.62 (0.50 to 0.71) -``."""
    if math.isnan(survival.tau.value):
        return "-"
    return f"{format_tau(survival.tau)}{MARKS.get(survival.verdict, '')}"


def format_tau(estimate: Estimate) -> str:
    """Format tau-b with its interval.

    >>> from saltflat.studies.effects.results import Estimate
    >>> format_tau(Estimate(0.5, 0.25, 0.75)), format_tau(Estimate(0.5))
    ('0.50 (0.25 to 0.75)', '0.50')
    """
    text = f"{estimate.value:.2f}"
    return f"{text} ({estimate.low:.2f} to {estimate.high:.2f})" if estimate.has_interval else text


def format_answer(fragility: Fragility, shift: ShiftSurvival) -> str:
    """Return a sentence: what keeps its order best, what worst, and which measures keep less of it than the gap."""
    measures = {
        name: shift.survivals[name]
        for name, each in fragility.quantities.items()
        if each.kind == "measure" and not math.isnan(shift.survivals[name].tau.value)
    }
    if not measures:
        return f"{shift.name}: no two runs to compare."
    best = max(measures, key=lambda name: measures[name].tau.value)
    worst = min(measures, key=lambda name: measures[name].tau.value)
    told = f"{shift.name}: {best} keeps most of its order, {format_tau(measures[best].tau)}"
    if worst != best:
        told += f"; {worst} least, {format_tau(measures[worst].tau)}"
    gap = shift.survivals[fragility.gap].tau
    if not math.isnan(gap.value):
        told += f"; the gap keeps {format_tau(gap)}"
    less = [name for name, each in measures.items() if each.verdict == LESS]
    return f"{told}. Clearly less than the gap: {join_words(less)}." if less else f"{told}."


def draw_fragility(fragility: Fragility) -> Figure:
    """Return a Figure with a panel per change and a row per quantity, made without pyplot: there is nothing to close.

    A mark is filled if the measure keeps clearly less or more of its order than the gap, whose interval is the band.
    """
    figures = import_optional("matplotlib.figure", "plot()")
    shifts, names = list(fragility.shifts.values()), list(fragility.quantities)
    size = (3.2 + 2.1 * max(len(shifts), 1), 1.4 + 0.24 * len(names))
    figure: Figure = figures.Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, max(len(shifts), 1), sharey=True, squeeze=False)[0]
    for panel, shift in zip(panels, shifts, strict=False):
        gap = shift.survivals[fragility.gap].tau
        if gap.has_interval:
            panel.axvspan(gap.low, gap.high, color="0.93", zorder=0)
        panel.axvline(0, color="0.8", linewidth=0.8)
        for row, name in enumerate(names):
            each = shift.survivals[name]
            if math.isnan(each.tau.value):
                continue
            color = {LESS: RED, MORE: BLUE}.get(each.verdict, GRAY)
            if each.tau.has_interval:
                panel.plot([each.tau.low, each.tau.high], [row, row], color=color, linewidth=1.2)
            face = color if each.verdict in (LESS, MORE) else "white"
            panel.plot([each.tau.value], [row], "o", markersize=4.5, color=color, markerfacecolor=face)
        panel.set_title(make_printable(shift.name), fontsize=9, parse_math=False)
        panel.set_xlim(-1.05 if any(each.tau.value < -0.3 for each in shift.survivals.values()) else -0.35, 1.05)
        panel.tick_params(axis="x", labelsize=8)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), [NAMES.get(name, name) for name in names], fontsize=8, parse_math=False)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel("Kendall's tau-b between the orders before and after; band: the gap's", fontsize=9)
    return figure
