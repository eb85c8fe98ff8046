"""A study in plain words: what was trained, what goes with the gap, and what does no better than a control."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from saltflat.report.change_text import format_count
from saltflat.report.html_page import format_setting
from saltflat.report.html_runs import find_levels, find_varied_settings
from saltflat.report.text import join_words, make_printable

if TYPE_CHECKING:
    from saltflat.studies.row import Row
    from saltflat.studies.scores import Score, Scores

# The score that sentences are about: of all pairs of networks, the share ordered as the gap orders them, minus the
# share ordered the other way round.
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
    """Whether a score tells the gap: its interval is above zero, below zero, or contains it."""
    low, high = score.intervals.get(name, (math.nan, math.nan))
    if math.isnan(low) or math.isnan(high) or math.isnan(compute_strength(score)):
        return UNKNOWN
    return WITH if low > 0 else AGAINST if high < 0 else NEITHER


def compute_strength(score: Score) -> float:
    """How closely it goes with the gap, in either direction."""
    found = getattr(score, HEADLINE)
    return math.nan if found is None else abs(found)


def format_runs(rows: Sequence[Row], axes: Sequence[str]) -> list[str]:
    """How many networks there are, how they ended, and what differs between them."""
    ends = {status: sum(row.status == status for row in rows) for status in ENDINGS}
    ended = join_words([f"{count} {ENDINGS[status]}" for status, count in ends.items() if count])
    said = [f"{format_count(len(rows), 'network')}: {ended}." if rows else "There are no networks yet."]
    names = find_varied_settings(rows, axes)
    if names:
        said.append(f"They differ in {join_words([_format_levels(rows, name) for name in names])}.")
    elif len(rows) > 1:
        said.append("They do not differ in any setting.")
    return said


def format_score_summary(scores: Scores) -> list[str]:
    """Which measures go with the gap and which do not; and whether any does better than the controls."""
    measures = [each for each in scores.scores.values() if each.kind == "measure"]
    controls = [each for each in scores.scores.values() if each.kind != "measure"]
    if not measures:
        return ["No measure was taken, so there is nothing to score."]
    # What it comes to is said first.
    return [
        *_compare_with_controls(measures, controls, scores.chance),
        *_format_relations(measures),
        *_format_granulated(measures),
    ]


def format_left_out(scores: Scores) -> str:
    """How many runs the scores are of, and why others are not among them."""
    reasons = join_words([f"{count} {reason}" for reason, count in scores.left_out.items() if count])
    return make_printable(
        f"Scores are over {format_count(scores.runs, 'run')}{f', without {reasons}' if reasons else ''}."
    )


def _format_relations(measures: Sequence[Score]) -> list[str]:
    by: dict[str, list[Score]] = {}
    for each in sorted(measures, key=_rank_score):
        by.setdefault(judge_score(each), []).append(each)
    said = []
    if not by.get(WITH) and not by.get(AGAINST):
        said.append("No measure goes with the gap: none has an interval that leaves out zero.")
    if by.get(WITH):
        said.append(f"Larger where the gap is larger: {_format_scored_names(by[WITH])}.")
    if by.get(AGAINST):
        said.append(f"Smaller where the gap is larger: {_format_scored_names(by[AGAINST])}.")
    if by.get(NEITHER):
        said.append(f"No sign of a relation, the interval contains zero: {_format_scored_names(by[NEITHER])}.")
    if by.get(UNKNOWN):
        said.append(f"Cannot be judged: {join_words([make_printable(each.name) for each in by[UNKNOWN]])}.")
    return said


def _format_granulated(measures: Iterable[Score]) -> list[str]:
    """Measures whose relation is not there, or is the opposite, when one setting changes and all others stay."""
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
    """Measures are there to grow with the gap, and count where that is sure; a control may go either way."""
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
    """The end of the interval that is nearer to zero."""
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
    """A score as it is printed; what is rounded to zero has no sign.

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
    """Every warning once; of those that only one of several gaps has, it is said which."""
    found = dict.fromkeys(make_printable(each) for each in given)
    common = [set(each.warnings) for each in scores.values()]
    shared = set.intersection(*common) if common else set()
    for gap, each in scores.items():
        for warning in each.warnings:
            label = "" if warning in shared else f"Gap in {gap}: "
            found[make_printable(label + warning)] = None
    return list(found)
