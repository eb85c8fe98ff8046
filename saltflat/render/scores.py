"""Render scores as text tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from saltflat.render.html.summary import format_score_summary
from saltflat.results.text import add_number_column, build_ruled_table, can_fit, fold_name, join_words, make_printable
from saltflat.studies.scores.results import Score

if TYPE_CHECKING:
    from saltflat.studies.scores.results import Scores


# The most important come first: narrow terminals show the rest in tables below.
HEADINGS = {
    "kendall_b": "Kendall\ntau-b",
    "interval": "tau-b,\n95 %",
    "granulated": "gran-\nulated",
    "cmi": "CMI",
    "sign_error_mean": "sign\nerror",
    "sign_error_p90": "sign err.,\n90 %",
    "sign_error_max": "sign err.,\nworst",
    "kendall_a": "Kendall\ntau-a",
    "spearman": "Spear-\nman",
    "pearson": "Pear-\nson",
    "pgdl": "PGDL",
}
# Explanations, by column.
LEGEND = {
    "kendall_b": "Kendall, Spearman, Pearson, granulated: -1 to 1, positive where the value grows with the gap.",
    "cmi": "CMI: 0 to 1, PGDL: 0 to 100, what it tells beyond the settings.",
    "sign_error_mean": "Sign error: 0 to 1, smaller is better, a coin has 0.5.",
}
WIDEST = 26


class ScoresTable:
    """Rich renderable of scores: a row per measure, in as many tables as the width requires."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scores = self.scores
        yield Text(f"Against the gap of the {scores.gap}, test minus training", style="bold")
        yield Text(" | ".join(_format_facts(scores)) + "\n")
        for line in format_score_summary(scores, brief=True):
            yield Text(make_printable(line))
        yield Text("")
        rest = [name for name in HEADINGS if name == "interval" or self._has_values(name)]
        legend = " ".join(text for name, text in LEGEND.items() if name in rest)
        notes = list(dict.fromkeys(note for each in scores.scores.values() for note in each.notes))
        while rest:
            count = 1
            while count < len(rest) and can_fit(self._render_table(rest[: count + 1], notes), console, options):
                count += 1
            yield self._render_table(rest[:count], notes)
            yield Text("")
            rest = rest[count:]
        for line in [
            *([legend] if legend else []),
            *(f"[{number}] {note}" for number, note in enumerate(notes, 1)),
            *scores.notes,
        ]:
            yield Text(make_printable(line))
        for warning in scores.warnings:
            yield Text(make_printable(f"Warning: {warning}"), style="bold")

    def _has_values(self, name: str) -> bool:
        return any(not math.isnan(getattr(each, name)) for each in self.scores.scores.values())

    def _render_table(self, columns: list[str], notes: list[str]) -> Table:
        found = list(self.scores.scores.values())
        table = build_ruled_table("measure")
        marked = any(each.notes for each in found)
        if marked:
            table.add_column("", overflow="fold")
        for column in columns:
            add_number_column(table, HEADINGS[column])
        for number, each in enumerate(found):
            if number and each.kind != found[number - 1].kind:
                table.add_row(Text("controls", style="italic"))
            marks = "".join(f"[{1 + notes.index(note)}]" for note in dict.fromkeys(each.notes))
            cells = [
                fold_name(each.name, WIDEST),
                *([marks] if marked else []),
                *(_format_score_cell(each, name) for name in columns),
            ]
            table.add_row(*map(Text, cells))
        return table


def _format_facts(scores: Scores) -> list[str]:
    many = f"{scores.runs} run{'s' * (scores.runs != 1)}"
    said = [many, f"{scores.configurations} configuration{'s' * (scores.configurations != 1)}"]
    said.append(f"axes {join_words(list(scores.axes))}" if scores.axes else "no axes")
    said += [f"left out: {count} {reason}" for reason, count in scores.left_out.items()]
    return [make_printable(each) for each in said]


def _format_score_cell(score: Score, name: str) -> str:
    if name == "interval":
        low, high = score.intervals.get("kendall_b", (math.nan, math.nan))
        return "-" if math.isnan(low) else f"{low:.2f} to {high:.2f}"
    value = getattr(score, name)
    return "-" if math.isnan(value) else f"{value:.1f}" if name == "pgdl" else f"{value:.2f}"
