"""Scores as the rows of tables: numbers with their intervals, and how strongly a cell is tinted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saltflat.report.html_summary import HEADLINE, compute_strength, format_two_digits, judge_score

if TYPE_CHECKING:
    from saltflat.studies.scores import Score, Scores

# By attribute: the heading, and what it means.
COLUMNS = {
    "kendall_b": ("Kendall τ-b", "Pairs of networks ordered as the gap orders them, minus those ordered otherwise."),
    "granulated": ("granulated", "The same for networks that differ in one setting, averaged over the settings."),
    "pearson": ("Pearson", "Correlation of the values themselves."),
    "spearman": ("Spearman", "Correlation of the ranks."),
    "kendall_a": ("Kendall τ-a", "As τ-b, with every tie counted as no order at all."),
    "cmi": ("CMI", "What the order says of the gap's order beyond the settings; 0 nothing, 1 everything."),
    "pgdl": ("PGDL", "The same in the form of the PGDL competition, times 100."),
    "sign_error_mean": ("sign error", "Share of pairs ordered wrongly, averaged over environments. Smaller is better."),
    "sign_error_p90": ("90 %", "The same, 90th percentile of the environments."),
    "sign_error_max": ("worst", "The same, in the worst environment."),
}
TINTS = 5


@dataclass(frozen=True)
class ScoreCell:
    """A number as it is shown, what it is sorted by, its interval, and how strongly it is tinted.

    Attributes:
        text: of the number; empty where there is none.
        order: what sorting goes by; None where there is no number.
        interval: as text, empty where there is none.
        tint: from -5 to 5.
    """

    text: str
    order: float | None
    interval: str = ""
    tint: int = 0


@dataclass(frozen=True)
class ScoreLine:
    """One measure or control in a table; ``bar`` is value, low and high for a bar from -1 to 1, if known."""

    name: str
    control: bool
    runs: int
    verdict: str
    cells: tuple[ScoreCell, ...]
    bar: tuple[float, float | None, float | None] | None


def build_score_lines(scores: Scores) -> tuple[list[tuple[str, str, str]], list[ScoreLine]]:
    """Headings (attribute, heading, meaning) and lines, the strongest first; columns that nobody has are left out."""
    found = list(scores.scores.values())
    columns = [name for name in COLUMNS if any(_is_known(getattr(each, name)) for each in found)]
    lines = [
        ScoreLine(
            each.name,
            each.kind != "measure",
            each.runs,
            judge_score(each),
            tuple(_build_score_cell(getattr(each, name), each.intervals.get(name)) for name in columns),
            _build_score_bar(each),
        )
        for each in _sort_by_strength(found)
    ]
    return [(name, *COLUMNS[name]) for name in columns], lines


def group_notes(scores: Scores) -> dict[str, list[str]]:
    """Each note once, with the names it is about."""
    found: dict[str, list[str]] = {}
    for each in scores.scores.values():
        for note in each.notes:
            found.setdefault(note, []).append(each.name)
    return found


def build_axis_lines(scores: Scores, axes: Sequence[str]) -> tuple[list[str], list[ScoreLine]]:
    """The granulated score of each axis; a column per axis that somebody has a score of."""
    found = _sort_by_strength(list(scores.scores.values()))
    known = dict.fromkeys([*axes, *(axis for each in found for axis in each.granulated_by_axis)])
    columns = [axis for axis in known if any(_is_known(each.granulated_by_axis.get(axis)) for each in found)]
    return columns, [_build_score_line(each, [each.granulated_by_axis.get(axis) for axis in columns]) for each in found]


def build_set_lines(scores: Scores) -> tuple[list[str], list[ScoreLine]]:
    """What the measure says beyond each set of settings."""
    found = _sort_by_strength(list(scores.scores.values()))
    sets = dict.fromkeys(name for each in found for name in each.cmi_by_set)
    return [_format_setting_set(each) for each in sets], [
        _build_score_line(one, [one.cmi_by_set.get(each) for each in sets]) for one in found
    ]


def _build_score_line(score: Score, values: Sequence[float | None]) -> ScoreLine:
    cells = tuple(_build_score_cell(each, None) for each in values)
    return ScoreLine(score.name, score.kind != "measure", score.runs, judge_score(score), cells, None)


def _format_setting_set(name: object) -> str:
    """Settings that are held fixed; of none, that there are none."""
    told = name if isinstance(name, str) else " + ".join(map(str, name)) if isinstance(name, tuple) else str(name)
    return told or "nothing"


def _sort_by_strength(scores: Sequence[Score]) -> list[Score]:
    return sorted(scores, key=lambda each: -compute_strength(each) if _is_known(compute_strength(each)) else math.inf)


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _build_score_cell(value: float | None, interval: tuple[float, float] | None) -> ScoreCell:
    if value is None or math.isnan(value):
        return ScoreCell("", None)
    tint = max(-TINTS, min(TINTS, round(TINTS * value))) if abs(value) <= 1 else 0
    # Of scores up to 100, such as PGDL's, the interval has as many digits as the number.
    large = max(abs(value), *map(abs, interval or (0.0, 0.0))) > 1
    digits = "{:.1f}".format if large else format_two_digits
    told = "" if interval is None or any(map(math.isnan, interval)) else " to ".join(map(digits, interval))
    return ScoreCell(digits(value), value, told, 0 if large else tint)


def _build_score_bar(score: Score) -> tuple[float, float | None, float | None] | None:
    value = getattr(score, HEADLINE)
    if not _is_known(value):
        return None
    low, high = score.intervals.get(HEADLINE, (math.nan, math.nan))
    return (value, None, None) if math.isnan(low) else (value, low, high)
