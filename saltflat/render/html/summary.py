"""Summarize a study in words, and its scores as rows: what was trained, and what correlates with the gap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saltflat.render.html.runs import find_levels, find_varied_settings
from saltflat.results.text import format_count, format_setting, join_words, make_printable

if TYPE_CHECKING:
    from saltflat.studies.row import Row
    from saltflat.studies.scores.results import Score, Scores


# The score that sentences are about: the fraction of pairs of networks ordered as their gaps, minus the fraction in
# reverse order.
HEADLINE = "kendall_b"
GRANULATED = "granulated"
WITH, AGAINST, NEITHER, UNKNOWN = "with", "against", "neither", "unknown"
GAPS = {"error": "test error minus training error", "loss": "test loss minus training loss"}
ENDINGS = {
    "done": "finished",
    "missed": "missed the stopping rule",
    "diverged": "diverged",
    "failed": "failed with an error",
}
MOST_LEVELS = 6


def judge_score(score: Score, name: str = HEADLINE) -> str:
    """Return whether the interval of a score is above zero, below zero, or contains it."""
    low, high = score.intervals.get(name, (math.nan, math.nan))
    if math.isnan(low) or math.isnan(high) or math.isnan(compute_strength(score)):
        return UNKNOWN
    return WITH if low > 0 else AGAINST if high < 0 else NEITHER


def compute_strength(score: Score) -> float:
    """Return how strongly a measure correlates with the gap, in either direction."""
    found = getattr(score, HEADLINE)
    return math.nan if found is None else abs(found)


def format_runs(rows: Sequence[Row], axes: Sequence[str]) -> list[str]:
    """Return sentences on the number of networks, how they ended, and their settings."""
    ends = {status: sum(row.status == status for row in rows) for status in ENDINGS}
    ended = join_words([f"{count} {ENDINGS[status]}" for status, count in ends.items() if count])
    said = [f"{format_count(len(rows), 'network')}: {ended}." if rows else "There are no networks yet."]
    names = find_varied_settings(rows, axes)
    if names:
        said.append(f"They differ in {join_words([_format_levels(rows, name) for name in names])}.")
    elif len(rows) > 1:
        said.append("They do not differ in any setting.")
    return said


def format_score_summary(scores: Scores, brief: bool = False) -> list[str]:
    """Return sentences on which measures correlate with the gap, and whether any beats the controls.

    Args:
        scores: of a study.
        brief: without the measures that show no relation.
    """
    measures = [each for each in scores.scores.values() if each.kind == "measure"]
    controls = [each for each in scores.scores.values() if each.kind != "measure"]
    if not measures:
        return ["No measure was computed, so there is nothing to score."]
    # The conclusion comes first.
    return [
        *_compare_with_controls(measures, controls, scores.chance),
        *_format_relations(measures, brief),
        *_format_granulated(measures),
    ]


def format_left_out(scores: Scores) -> str:
    """Return a sentence on the runs that were scored, and why others were not."""
    reasons = join_words([f"{count} {reason}" for reason, count in scores.left_out.items() if count])
    return make_printable(
        f"Scores are over {format_count(scores.runs, 'run')}{f', without {reasons}' if reasons else ''}."
    )


def _format_relations(measures: Sequence[Score], brief: bool) -> list[str]:
    by: dict[str, list[Score]] = {}
    for each in sorted(measures, key=_rank_score):
        by.setdefault(judge_score(each), []).append(each)
    said = []
    if not by.get(WITH) and not by.get(AGAINST):
        said.append("No measure correlates with the gap: every interval contains zero.")
    if by.get(WITH):
        said.append(f"Larger where the gap is larger: {_format_scored_names(by[WITH])}.")
    if by.get(AGAINST):
        said.append(f"Smaller where the gap is larger: {_format_scored_names(by[AGAINST])}.")
    if by.get(NEITHER) and not brief:
        said.append(f"No sign of a relation, the interval contains zero: {_format_scored_names(by[NEITHER])}.")
    if by.get(UNKNOWN):
        said.append(f"Cannot be judged: {join_words([make_printable(each.name) for each in by[UNKNOWN]])}.")
    return said


def _format_granulated(measures: Iterable[Score]) -> list[str]:
    """Return sentences on measures whose correlation vanishes or reverses when only one setting changes."""
    sure = [each for each in measures if judge_score(each) in (WITH, AGAINST)]
    lost = [each for each in sure if judge_score(each, GRANULATED) == NEITHER]
    turned = [each for each in sure if judge_score(each, GRANULATED) in {WITH, AGAINST} - {judge_score(each)}]
    said = []
    for told, some in {"No longer sure": lost, "The other way round": turned}.items():
        if some:
            names = join_words([f"{make_printable(each.name)} ({_format_score(each, GRANULATED)})" for each in some])
            said.append(f"{told} where a single setting changes and all others stay (granulated score): {names}.")
    return said


def _compare_with_controls(measures: Sequence[Score], controls: Sequence[Score], chance: float) -> list[str]:
    """Compare the measures that surely grow with the gap with the controls, which may correlate either way."""
    judged = [each for each in measures if judge_score(each) == WITH]
    known = sorted((each for each in controls if not math.isnan(compute_strength(each))), key=_rank_score)
    if not known:
        return ["There is no control to compare with."]
    if not judged:
        return ["No measure's 95 % interval lies above zero, so none can be said to beat the controls."]
    unbeaten = [each for each in known if not any(compute_strength(one) > compute_strength(each) for one in judged)]
    if unbeaten:
        return [f"No measure that grows with the gap does better than {_join_with_or(unbeaten)}."]
    best = known[0]
    ahead = [each for each in sorted(judged, key=_rank_score) if compute_strength(each) > compute_strength(best)]
    clear = [each for each in ahead if _compute_least_strength(each) > compute_strength(best)]
    told = clear or ahead
    said = (
        f"{_format_scored_names(told)} {'do' if len(told) > 1 else 'does'} better than every control; "
        f"the best of those is {make_printable(best.name)} ({_format_score(best)})."
    )
    if not clear:
        said += " That lead is within the uncertainty."
    if compute_strength(told[0]) <= chance:
        said += f" By chance alone the best of as many unrelated measures would as often as not reach {chance:.2f}."
    return [said]


def _compute_least_strength(score: Score) -> float:
    """Return the end of the interval that is closer to zero."""
    return min(map(abs, score.intervals[HEADLINE]))


def _rank_score(score: Score) -> float:
    return -compute_strength(score) if not math.isnan(compute_strength(score)) else math.inf


def _format_scored_names(scores: Iterable[Score]) -> str:
    return join_words([f"{make_printable(each.name)} ({_format_score(each)})" for each in scores])


def _join_with_or(scores: Sequence[Score]) -> str:
    names = [f"{make_printable(each.name)} ({_format_score(each)})" for each in scores]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _format_score(score: Score, name: str = HEADLINE) -> str:
    value = format_two_digits(getattr(score, name))
    low, high = score.intervals.get(name, (math.nan, math.nan))
    return value if math.isnan(low) else f"{value}, {format_two_digits(low)} to {format_two_digits(high)}"


def format_two_digits(value: float) -> str:
    """Format a score with two digits; what rounds to zero has no sign.

    Example:
        >>> format_two_digits(-0.001), format_two_digits(-0.625)
        ('0.00', '-0.62')
    """
    return f"{round(value, 2) + 0.0:.2f}"


def _format_levels(rows: Sequence[Row], name: str) -> str:
    known = [format_setting(each) for each in find_levels(rows, name)]
    if len(known) > MOST_LEVELS:
        return f"{make_printable(name)} ({len(known)} values)"
    return f"{make_printable(name)} ({'; '.join(known)})"


def collect_warnings(given: Iterable[str], scores: Mapping[str, Scores]) -> list[str]:
    """Return every warning once, with its gap if only one of several has it."""
    found = dict.fromkeys(make_printable(each) for each in given)
    common = [set(each.warnings) for each in scores.values()]
    shared = set.intersection(*common) if common else set()
    for gap, each in scores.items():
        for warning in each.warnings:
            label = "" if warning in shared else f"Gap in {gap}: "
            found[make_printable(label + warning)] = None
    return list(found)


# By attribute: the heading and its meaning.
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
    """A cell of a table of scores.

    Attributes:
        text: the number as text; empty if there is none.
        order: the key for sorting; None if there is no number.
        interval: the interval as text; empty if there is none.
        tint: the strength of the tint, from -5 to 5.
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
    """Return headings (attribute, heading, meaning) and lines, the strongest first, without empty columns."""
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
    """Return each note once, with the names it is about."""
    found: dict[str, list[str]] = {}
    for each in scores.scores.values():
        for note in each.notes:
            found.setdefault(note, []).append(each.name)
    return found


def build_axis_lines(scores: Scores, axes: Sequence[str]) -> tuple[list[str], list[ScoreLine]]:
    """Return the granulated scores by axis, without empty columns."""
    found = _sort_by_strength(list(scores.scores.values()))
    known = dict.fromkeys([*axes, *(axis for each in found for axis in each.granulated_by_axis)])
    columns = [axis for axis in known if any(_is_known(each.granulated_by_axis.get(axis)) for each in found)]
    return columns, [_build_score_line(each, [each.granulated_by_axis.get(axis) for axis in columns]) for each in found]


def build_set_lines(scores: Scores) -> tuple[list[str], list[ScoreLine]]:
    """Return the conditional mutual information given each set of settings."""
    found = _sort_by_strength(list(scores.scores.values()))
    sets = dict.fromkeys(name for each in found for name in each.cmi_by_set)
    return [_format_setting_set(each) for each in sets], [
        _build_score_line(one, [one.cmi_by_set.get(each) for each in sets]) for one in found
    ]


def _build_score_line(score: Score, values: Sequence[float | None]) -> ScoreLine:
    cells = tuple(_build_score_cell(each, None) for each in values)
    return ScoreLine(score.name, score.kind != "measure", score.runs, judge_score(score), cells, None)


def _format_setting_set(name: str | tuple[str, ...]) -> str:
    """Format the settings that are held fixed."""
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
    # For scores up to 100, such as PGDL's, the interval has as many digits as the number.
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
