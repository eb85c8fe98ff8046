"""Everything that the page of a study shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.report.change_text import many
from saltflat.report.html_audit import audited
from saltflat.report.html_drawn import picture, small
from saltflat.report.html_page import setting
from saltflat.report.html_problems import endings, failures, named
from saltflat.report.html_runs import constant, island, values_of, varied
from saltflat.report.html_scores import axis_lines, notes_told, score_lines, set_lines
from saltflat.report.html_summary import GAPS, left_out_told, runs_told, scores_told, warnings_of

if TYPE_CHECKING:
    from saltflat.landscape import Landscape
    from saltflat.report.audit import Audit
    from saltflat.studies.row import Row
    from saltflat.studies.scores import Scores

# Letters of pictures in the page, so that it stays small enough to send.
MOST_PICTURES = 900_000


def study_content(
    rows: Sequence[Row],
    axes: Sequence[str],
    scores: Mapping[str, Scores],
    audits: Mapping[str, Audit],
    landscapes: Mapping[str, Landscape],
    warnings: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script draws, and what the template fills in."""
    controls = _controls(rows, scores)
    values = values_of(rows, controls)
    gaps = {gap: [row.gap.get(gap) for row in rows] for gap in (scores or GAPS)}
    names = varied(rows, axes)
    pictures, unseen = _pictures(landscapes)
    by_key = {row.key: row for row in rows}
    content: dict[str, Any] = {
        "runs": runs_told(rows, axes),
        "warnings": warnings_of(warnings, scores),
        "gaps": {gap: GAPS.get(gap, gap) for gap in gaps},
        "told": {gap: [*scores_told(each), left_out_told(each)] for gap, each in scores.items()},
        "remarks": {gap: notes_told(each) for gap, each in scores.items()},
        "notes": {gap: each.notes for gap, each in scores.items()},
        "smalls": {gap: [small(name, each, numbers) for name, each in values.items()] for gap, numbers in gaps.items()},
        "tables": {gap: score_lines(each) for gap, each in scores.items()},
        "by_axis": {gap: axis_lines(each, axes) for gap, each in scores.items()},
        "by_set": {gap: set_lines(each) for gap, each in scores.items()},
        "audits": [
            (named(by_key[key], names) if key in by_key else key, audited(each)) for key, each in audits.items()
        ],
        "failures": failures(rows, axes),
        "missed": endings(rows, axes, "missed"),
        "diverged": endings(rows, axes, "diverged"),
        "pictures": pictures,
        "unseen": unseen,
        "constant": constant(rows, axes),
        "measured": _told_by_count(row.measured for row in rows if row.measured),
        "made_with": _told_by_count(row.made_with for row in rows if row.made_with),
        "seconds": {
            step: sum(row.seconds.get(step, 0.0) for row in rows)
            for step in dict.fromkeys(step for row in rows for step in row.seconds)
        },
    }
    lines = [line for _, found in content["tables"].values() for line in found if not line.control]
    first = next((line.name for line in lines if line.name in values), "")
    measures = {name for row in rows for name in row.readings}
    return island(rows, axes, values, [name for name in values if name not in measures], first), content


def _controls(rows: Sequence[Row], scores: Mapping[str, Scores]) -> dict[str, list[float | None]]:
    """The controls that were scored, by name, a number per run."""
    from saltflat.studies.controls import controls_of  # which itself needs readings

    found = [controls_of(row) if row.outcome is not None else {} for row in rows]
    scored = [name for each in scores.values() for name, one in each.scores.items() if one.kind != "measure"]
    known = dict.fromkeys([*scored, *(name for each in found for name in each)])
    return {name: [each.get(name) for each in found] for name in known if any(name in each for each in found)}


def _pictures(landscapes: Mapping[str, Landscape]) -> tuple[list[tuple[str, str]], list[str]]:
    """Pictures by name as data, and the names of those that there is no room for."""
    shown: list[tuple[str, str]] = []
    unseen, room = [], MOST_PICTURES
    for name, each in landscapes.items():
        drawn = picture(each.plot())
        if len(drawn) > room:
            unseen.append(name)
        else:
            room -= len(drawn)
            shown.append((name, drawn))
    return shown, unseen


def _told_by_count(given: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By name, what all have; where they differ, how many have which."""
    counted: dict[str, Counter[str]] = {}
    for each in given:
        for name, value in each.items():
            counted.setdefault(name, Counter())[setting(value)] += 1
    return {
        name: next(iter(found))
        if len(found) == 1
        else "; ".join(f"{value} ({many(count, 'run')})" for value, count in found.items())
        for name, found in counted.items()
    }
