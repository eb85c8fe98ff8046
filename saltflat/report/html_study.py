"""Everything that the page of a study shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.report.change_text import format_count
from saltflat.report.html_audit import build_audit_view
from saltflat.report.html_drawn import build_small_scatter, encode_picture
from saltflat.report.html_page import format_setting
from saltflat.report.html_problems import collect_failures, collect_unsuccessful_runs, format_run_name
from saltflat.report.html_runs import build_scatter_data, collect_values, find_constant_settings, find_varied_settings
from saltflat.report.html_scores import build_axis_lines, build_score_lines, build_set_lines, group_notes
from saltflat.report.html_summary import GAPS, collect_warnings, format_left_out, format_runs, format_score_summary

if TYPE_CHECKING:
    from saltflat.landscape import Landscape
    from saltflat.report.audit import Audit
    from saltflat.studies.row import Row
    from saltflat.studies.scores import Scores

# Letters of pictures in the page, so that it stays small enough to send.
MOST_PICTURES = 900_000


def build_study_content(
    rows: Sequence[Row],
    axes: Sequence[str],
    scores: Mapping[str, Scores],
    audits: Mapping[str, Audit],
    landscapes: Mapping[str, Landscape],
    warnings: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script draws, and what the template fills in."""
    controls = _collect_controls(rows, scores)
    values = collect_values(rows, controls)
    gaps = {gap: [row.gap.get(gap) for row in rows] for gap in (scores or GAPS)}
    names = find_varied_settings(rows, axes)
    pictures, unseen = _encode_pictures(landscapes)
    by_key = {row.key: row for row in rows}
    content: dict[str, Any] = {
        "runs": format_runs(rows, axes),
        "warnings": collect_warnings(warnings, scores),
        "gaps": {gap: GAPS.get(gap, gap) for gap in gaps},
        "told": {gap: [*format_score_summary(each), format_left_out(each)] for gap, each in scores.items()},
        "remarks": {gap: group_notes(each) for gap, each in scores.items()},
        "notes": {gap: each.notes for gap, each in scores.items()},
        "smalls": {
            gap: [build_small_scatter(name, each, numbers) for name, each in values.items()]
            for gap, numbers in gaps.items()
        },
        "tables": {gap: build_score_lines(each) for gap, each in scores.items()},
        "by_axis": {gap: build_axis_lines(each, axes) for gap, each in scores.items()},
        "by_set": {gap: build_set_lines(each) for gap, each in scores.items()},
        "audits": [
            (format_run_name(by_key[key], names) if key in by_key else key, build_audit_view(each))
            for key, each in audits.items()
        ],
        "failures": collect_failures(rows, axes),
        "missed": collect_unsuccessful_runs(rows, axes, "missed"),
        "diverged": collect_unsuccessful_runs(rows, axes, "diverged"),
        "pictures": pictures,
        "unseen": unseen,
        "constant": find_constant_settings(rows, axes),
        "measured": _format_by_count(row.measured for row in rows if row.measured),
        "made_with": _format_by_count(row.made_with for row in rows if row.made_with),
        "seconds": {
            step: sum(row.seconds.get(step, 0.0) for row in rows)
            for step in dict.fromkeys(step for row in rows for step in row.seconds)
        },
    }
    lines = [line for _, found in content["tables"].values() for line in found if not line.control]
    first = next((line.name for line in lines if line.name in values), "")
    measures = {name for row in rows for name in row.readings}
    return build_scatter_data(rows, axes, values, [name for name in values if name not in measures], first), content


def _collect_controls(rows: Sequence[Row], scores: Mapping[str, Scores]) -> dict[str, list[float | None]]:
    """The controls that were scored, by name, a number per run."""
    from saltflat.studies.controls import compute_controls  # which itself needs readings

    found = [compute_controls(row) if row.outcome is not None else {} for row in rows]
    scored = [name for each in scores.values() for name, one in each.scores.items() if one.kind != "measure"]
    known = dict.fromkeys([*scored, *(name for each in found for name in each)])
    return {name: [each.get(name) for each in found] for name in known if any(name in each for each in found)}


def _encode_pictures(landscapes: Mapping[str, Landscape]) -> tuple[list[tuple[str, str]], list[str]]:
    """Pictures by name as data, and the names of those that there is no room for."""
    shown: list[tuple[str, str]] = []
    unseen, room = [], MOST_PICTURES
    for name, each in landscapes.items():
        drawn = encode_picture(each.plot())
        if len(drawn) > room:
            unseen.append(name)
        else:
            room -= len(drawn)
            shown.append((name, drawn))
    return shown, unseen


def _format_by_count(given: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By name, what all have; where they differ, how many have which."""
    counted: dict[str, Counter[str]] = {}
    for each in given:
        for name, value in each.items():
            counted.setdefault(name, Counter())[format_setting(value)] += 1
    return {
        name: next(iter(found))
        if len(found) == 1
        else "; ".join(f"{value} ({format_count(count, 'run')})" for value, count in found.items())
        for name, found in counted.items()
    }
