"""Collect the content of the page of a study."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saltflat.audit.change import BROKEN, MOVES, STAYS, UNCLAIMED
from saltflat.render.audit import (
    KINDS,
    format_audit_facts,
    format_audit_footer,
    format_audit_marks,
    format_change,
    sort_measures,
)
from saltflat.render.effects import format_answers, format_estimate, format_unknown, format_value
from saltflat.render.html.page import build_small_scatter, encode_picture
from saltflat.render.html.runs import (
    build_scatter_data,
    collect_failures,
    collect_unsuccessful_runs,
    collect_values,
    find_constant_settings,
    find_varied_settings,
    format_run_name,
)
from saltflat.render.html.summary import (
    GAPS,
    build_axis_lines,
    build_score_lines,
    build_set_lines,
    collect_warnings,
    format_left_out,
    format_runs,
    format_score_summary,
    group_notes,
)
from saltflat.results.text import format_count, format_number, format_power, format_setting, make_printable

if TYPE_CHECKING:
    from saltflat.audit.result import Audit, AuditLine
    from saltflat.landscape.result import Landscape
    from saltflat.studies.effects.results import AxisEffects, Effects, Estimate
    from saltflat.studies.row import Row
    from saltflat.studies.scores.results import Scores


TONES = {STAYS: "good", UNCLAIMED: "good", MOVES: "plain", BROKEN: "bad"}
WIDTH = 100
LEAST_DECADES = 0.5


@dataclass(frozen=True)
class ChangeView:
    """The effect of one kind of rescaling on one measure; ``path`` has a dot per draw, on a strip 100 wide."""

    told: str
    verdict: str
    tone: str
    path: str


@dataclass(frozen=True)
class AuditView:
    """An audit as the page shows it; ``reach`` is the factor at the right end of the strips."""

    model: str
    facts: list[str]
    kinds: list[str]
    lines: list[tuple[str, str, str, str, list[ChangeView]]]
    reach: str
    holds: bool
    below: list[str]


def build_audit_view(audit: Audit) -> AuditView:
    """Return the audit as the page shows it: broken claims first, the largest moves last."""
    kinds = list(dict.fromkeys(kind for line in audit.values() for kind in line.changes))
    # Differences of logarithms may span hundreds of decades, and would squeeze all others.
    counted = [line for line in audit.values() if not line.logarithmic]
    found = [abs(each) for line in counted for kind in line.changes for each in line.compute_draw_decades(kind)]
    reach = max([LEAST_DECADES, *filter(math.isfinite, found)])
    lines = [
        (
            name,
            format_audit_marks(audit[name]),
            format_number(audit[name].reading.value),
            str(audit.report.legend.get(name, {}).get("meaning", "")),
            [_build_change_view(audit[name], kind, reach) for kind in kinds],
        )
        for name in sort_measures(audit)
    ]
    said = [KINDS.get(kind, kind) for kind in kinds]
    return AuditView(
        audit.report.model,
        format_audit_facts(audit),
        said,
        lines,
        format_power(reach),
        audit.holds,
        format_audit_footer(audit),
    )


def _build_change_view(line: AuditLine, kind: str, reach: float) -> ChangeView:
    change = line.changes[kind]
    places = [each for each in line.compute_draw_decades(kind) if not math.isnan(each)]
    # Moves from or to zero are infinite: at the end of the strip.
    ends = [max(-1.0, min(1.0, each / reach)) for each in places]
    path = "".join(f"M{WIDTH / 2 + each * (WIDTH / 2 - 4):.1f} 8h0" for each in ends)
    return ChangeView(format_change(change, line.logarithmic), change.verdict, TONES.get(change.verdict, "plain"), path)


# Characters of pictures in the page, so that it stays small enough to send.
MOST_PICTURES = 900_000


def build_study_content(
    rows: Sequence[Row],
    axes: Sequence[str],
    scores: Mapping[str, Scores],
    audits: Mapping[str, Audit],
    landscapes: Mapping[str, Landscape],
    warnings: Sequence[str],
    effects: Effects | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of the script, and the variables of the template."""
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
        "effects": None if effects is None else build_effects_view(effects),
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


@dataclass(frozen=True)
class EffectCell:
    """A mean or a change in the table of a setting; ``order`` sorts it, None if there is no number."""

    text: str
    interval: str = ""
    verdict: str = ""
    order: float | None = None


@dataclass(frozen=True)
class AxisView:
    """One setting as the page shows it.

    Attributes:
        name: the name of the setting.
        base: the value that others are compared with.
        answers: a sentence per other value.
        picture: the plot as a data URL; empty if it does not fit.
        columns: headings, with what stands below them.
        lines: by quantity, whether it is a measure, and a cell per column.
    """

    name: str
    base: str
    answers: list[str]
    picture: str
    columns: list[tuple[str, str]]
    lines: list[tuple[str, bool, list[EffectCell]]]


@dataclass(frozen=True)
class EffectsView:
    """The section on settings: a view per setting, sentences below, and reasons for doubt."""

    axes: list[AxisView]
    below: list[str]
    warnings: list[str]


def build_effects_view(effects: Effects) -> EffectsView:
    """Return the effects as the page shows them, with as many plots as fit."""
    found, room = [], MOST_PICTURES
    for axis in effects.axes.values():
        picture = encode_picture(effects.plot(axis.name))
        picture = picture if len(picture) <= room else ""
        room -= len(picture)
        columns = [(axis.describe(axis.base), format_count(axis.base.runs, "run"))]
        for value in axis.others:
            columns += [
                (axis.describe(value), format_count(value.runs, "run")),
                ("change", format_count(value.pairs, "pair")),
            ]
        lines = [
            (name, quantity.kind == "measure", _build_effect_cells(axis, name))
            for name, quantity in effects.quantities.items()
        ]
        found.append(
            AxisView(axis.name, axis.describe(axis.base), format_answers(effects, axis), picture, columns, lines)
        )
    below = [*format_unknown(effects), *effects.notes]
    return EffectsView(found, [make_printable(each) for each in below], [*map(make_printable, effects.warnings)])


def _build_effect_cells(axis: AxisEffects, name: str) -> list[EffectCell]:
    cells = [_build_mean_cell(axis.base.means[name].estimate)]
    for value in axis.others:
        change = value.changes[name]
        cells.append(_build_mean_cell(value.means[name].estimate))
        if math.isnan(change.estimate.value):
            cells.append(EffectCell(""))
            continue
        told, _, rest = format_estimate(change.estimate, change.ratio is not None).partition(" (")
        verdict = f"{change.verdict}{' *' * change.is_sure}"
        order = change.estimate.value
        cells.append(EffectCell(told.replace("x ", "\u00d7 "), rest.rstrip(")"), verdict, order))
    return cells


def _build_mean_cell(estimate: Estimate) -> EffectCell:
    if math.isnan(estimate.value):
        return EffectCell("")
    ends = [format_value(each) for each in (estimate.low, estimate.high)] if estimate.has_interval else []
    return EffectCell(format_value(estimate.value), " to ".join(ends), order=estimate.value)


def _collect_controls(rows: Sequence[Row], scores: Mapping[str, Scores]) -> dict[str, list[float | None]]:
    """Return the scored controls by name, a number per run."""
    from saltflat.studies.row import compute_controls  # imports readings itself

    found = [compute_controls(row) if row.outcome is not None else {} for row in rows]
    scored = [name for each in scores.values() for name, one in each.scores.items() if one.kind != "measure"]
    known = dict.fromkeys([*scored, *(name for each in found for name in each)])
    return {name: [each.get(name) for each in found] for name in known if any(name in each for each in found)}


def _encode_pictures(landscapes: Mapping[str, Landscape]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return pictures as data URLs by name, and the names of those that do not fit."""
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
    """Return by name the common value, or each value with its number of runs."""
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
