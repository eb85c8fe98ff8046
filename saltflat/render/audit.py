"""Render an audit in words and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.audit.change import BROKEN, MOVES, STAYS, UNDEFINED, UNMEASURED, WITHIN, Change
from saltflat.render.report import SIGNS, format_signs, render_paragraph, wrap_html
from saltflat.render.report import render_html_table as html_table
from saltflat.render.symmetry import format_names, format_operation
from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    can_fit,
    format_count,
    format_factor,
    format_number,
    format_power,
    format_short,
    join_words,
    make_printable,
    strip_markup,
)
from saltflat.symmetry.tracing.trace import Obstacle

if TYPE_CHECKING:
    from rich.table import Table

    from saltflat.audit.result import Audit, AuditLine


def format_change(change: Change, logarithmic: bool, brief: bool = False) -> str:
    """Format how far a measure moved: its relative change if it stayed, else the range of factors.

    Args:
        change: the effect of the draws.
        logarithmic: whether differences matter, not ratios.
        brief: only the factor farthest from 1, or the largest difference.
    """
    if change.verdict in (UNDEFINED, UNMEASURED):
        return ""
    if change.is_unchanged:
        return "exactly" if change.moved == 0 else f"within {format_short(change.moved, 1)}"
    if math.isnan(change.smallest):
        return "undefined"
    lost = ", or undefined" if any(value is not None and math.isnan(value) for value in change.values) else ""
    if not logarithmic and math.isinf(change.smallest):
        return "away from 0" + lost
    ends = list(dict.fromkeys([change.smallest, change.largest]))
    if brief:
        ends = [max(ends, key=abs if logarithmic else _compute_ratio_distance)]
    shown = [format_short(end, 3, "+") if logarithmic else format_factor(end) for end in ends]
    return "x " * (not logarithmic) + " to ".join(dict.fromkeys(shown)) + lost


def _compute_ratio_distance(ratio: float) -> float:
    """Return how far a ratio is from 1; infinite if the sign changed or the value vanished."""
    return abs(math.log(ratio)) if ratio > 0 else math.inf


# The most common measure of flatness.
USUAL = "hessian_trace"


def format_audit_summary(audit: Audit) -> list[str]:
    """Return sentences on broken claims, the measure that moved most, and how exactly the others stayed."""
    said = [
        f"{name} {_format_farthest_move(audit[name], BROKEN)}, though it claims to stay."
        for name in audit.broken_claims
    ]
    movers = [name for name in audit if MOVES in audit[name].verdicts.values() and name not in audit.broken_claims]
    kept = {name: moved for name, line in audit.items() if (moved := _compute_claimed_change(line)) is not None}
    parts = []
    if movers:
        most = USUAL if USUAL in movers else max(movers, key=lambda name: _rank_mover(audit[name]))
        parts.append(f"{most} {_format_farthest_move(audit[most], MOVES)}")
    if kept:
        one = next(iter(kept))
        if len(kept) == 1:
            who = "it" if movers and most == one else one
            where = "where it claims to"
        else:
            who = f"{'the' if parts else 'The'} {len(kept)} measures that claim to stay"
            where = "where they claim to"
        worst = max(kept.values())
        parts.append(f"{who} stayed {where}, {f'within {format_short(worst, 1)}' if worst else 'exactly'}")
    return [*said, " while ".join(parts) + "."] if parts else said


def compute_max_decades(line: AuditLine, *verdicts: str) -> float:
    """Return by how many powers of ten the measure moved at most; infinite where a ratio has no meaning.

    Args:
        line: the measure.
        verdicts: count only the kinds of rescaling with one of these verdicts, if any are given.
    """
    found = [abs(each) for kind in _select_kinds(line, verdicts) for each in line.compute_draw_decades(kind)]
    told = [each for each in found if not math.isnan(each)]
    return max(told) if told else math.inf if found else 0.0


def _compute_claimed_change(line: AuditLine) -> float | None:
    """Return the change of a measure that stayed wherever it claims to; None for others."""
    claimed = [change for change in line.changes.values() if change.claimed]
    if not claimed or any(change.verdict != STAYS for change in claimed):
        return None
    return max(change.moved for change in claimed)


def _format_farthest_move(line: AuditLine, verdict: str) -> str:
    if line.logarithmic:
        return f"moved by {format_short(max(line.changes[kind].moved for kind in _select_kinds(line, [verdict])))}"
    if not _has_finite_ratios(line, verdict):
        return "changed its sign, or became or was zero, infinite or undefined"
    return f"moved by a factor of {format_power(compute_max_decades(line, verdict))}"


def _rank_mover(line: AuditLine) -> tuple[bool, float]:
    """Rank factors before differences, and finite numbers before others."""
    return _has_finite_ratios(line, MOVES) and not line.logarithmic, compute_max_decades(line, MOVES)


def _has_finite_ratios(line: AuditLine, verdict: str) -> bool:
    return all(
        math.isfinite(each) for kind in _select_kinds(line, [verdict]) for each in line.compute_draw_decades(kind)
    )


def _select_kinds(line: AuditLine, verdicts: Sequence[str]) -> list[str]:
    return [kind for kind, found in line.verdicts.items() if not verdicts or found in verdicts]


# The kinds of rescaling in words.
KINDS = {"layer": "by layer", "unit": "by unit"}
MOST_OBSTACLES = 6


def format_audit_facts(audit: Audit) -> list[str]:
    """Return what was audited, and how, as the parts of a line."""
    report = audit.report
    tried = [
        f"{format_count(audit.draws, 'draw')} {KINDS.get(kind, kind)} ({format_count(count, 'scale')})"
        for kind, count in audit.scales.items()
        if count
    ]
    said = [format_count(report.examples, "example"), f"loss {format_number(report.loss)}", *tried]
    said += [f"spread {format_number(audit.spread)}", "float64", report.device, f"{format_number(audit.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def sort_measures(audit: Audit) -> list[str]:
    """Return the names of measures: broken claims first, then those that stay, then those that move."""

    def rank(name: str) -> tuple[int, float]:
        changes = list(audit[name].changes.values())
        verdicts = {change.verdict for change in changes}
        if verdicts & {BROKEN}:
            return 0, -compute_max_decades(audit[name])
        if verdicts & {WITHIN}:
            return 1, compute_max_decades(audit[name])
        if verdicts & {MOVES}:
            return 3, compute_max_decades(audit[name])
        return (4, 0.0) if verdicts <= {UNDEFINED, UNMEASURED} else (2, -sum(change.claimed for change in changes))

    return sorted(audit, key=rank)


def format_audit_marks(line: AuditLine) -> str:
    """Return the signs for estimates and for solvers that stopped early before or after a draw."""
    shown = format_signs(line.reading).replace("!", "")
    return shown + "!" * any(not change.converged for change in line.changes.values())


def format_audit_footer(audit: Audit) -> list[str]:
    """Return the lines below the table: signs, failed draws, obstacles, and the summary."""
    lines = list(audit.lines.values())
    used = "".join(map(format_audit_marks, lines))
    said = [f"{sign} {meaning}" for sign, meaning in SIGNS.items() if sign in used]
    if any(line.logarithmic for line in lines if line.changes):
        said.append("+ and - are differences, of measures that are logarithms")
    said += [f"Note: {note}" for note in audit.notes]
    for kind, draws in audit.failed.items():
        by_reason: dict[str, list[str]] = {}
        for draw, why in draws.items():
            by_reason.setdefault(why, []).append(draw)
        said += [f"Failed: draw {join_words(names)} {KINDS.get(kind, kind)}: {why}" for why, names in by_reason.items()]
    lost = [name for name, line in audit.items() if UNDEFINED in line.verdicts.values() and line.reading.notes]
    said += [f"Note on {name}: {note}" for name in audit.broken_claims for note in audit[name].reading.notes]
    said += [f"Not defined: {name}: {audit[name].reading.notes[0]}" for name in lost]
    left: dict[str, list[str]] = {}
    for name, why in audit.report.left_out.items():
        left.setdefault(why, []).append(name)
    said += [f"Left out: {join_words(names)}: {why}" for why, names in left.items()]
    said += [*format_missing_rescalings(audit), *format_audit_summary(audit)]
    return [make_printable(each) for each in said]


def format_missing_rescalings(audit: Audit) -> list[str]:
    """Return sentences on kinds of rescaling that the network does not have, and why."""
    none = [kind for kind, count in audit.scales.items() if not count]
    pinned = format_obstacles(audit.obstacles)
    if len(none) == len(audit.scales):
        kinds = "" if len(none) > 1 else f" {KINDS.get(none[0], none[0])}"
        why = (
            f"held fixed by {pinned}"
            if pinned
            else "there is no unit between its inputs and its outputs whose size is free"
        )
        return [f"This network has no rescalings{kinds}: {why}."]
    said = [f"This network has no rescalings {KINDS.get(kind, kind)}, of whole parameters at once." for kind in none]
    return [*said, *([f"Held fixed by {pinned}."] if pinned else [])]


def format_obstacles(obstacles: Sequence[Mapping[str, Any]]) -> str:
    """Return the operations that prevent rescaling, each once, with its first location."""
    places: dict[str, list[str]] = {}
    for each in sorted(obstacles, key=lambda each: bool(each["known"])):
        found = Obstacle(each["operation"], each["where"], each["line"], each["known"], 0)
        name = format_operation(found) if found.known else f"{found.operation} (which has no rule)"
        places.setdefault(name, []).append(f"in {found.where}" if found.where else f"at {found.line or 'the top'}")
    said = [f"{name} {format_names(dict.fromkeys(where), 1)}" for name, where in places.items()]
    rest = len(said) - MOST_OBSTACLES
    return "; ".join(said[:MOST_OBSTACLES]) + (f"; and {rest} more operations" if rest > 0 else "")


EMPTY = "Nothing was measured."
STYLES = {BROKEN: "bold red", STAYS: "green", MOVES: "yellow"}


class AuditTable:
    """Rich renderable of an audit."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        audit = self.audit
        yield Text(make_printable(audit.report.model), style="bold")
        yield Text(" | ".join(format_audit_facts(audit)) + "\n")
        if not audit:
            yield Text(EMPTY)
        else:
            fitting = [table for table in _render_audit_tables(audit) if can_fit(table, console, options)]
            yield fitting[0] if fitting else Text("\n").join(_render_audit_lines(audit))
        yield Text("")
        for line in format_audit_footer(audit):
            yield Text(line)


def render_audit_html(audit: Audit) -> str:
    """Return the audit as HTML."""
    kinds = _collect_kinds(audit)
    header = ["measure", "", "value", *(cell for kind in kinds for cell in (KINDS.get(kind, kind), "verdict"))]
    rows = [
        [
            name,
            format_audit_marks(audit[name]),
            format_number(audit[name].reading.value),
            *(cell.plain for cell in _render_verdict_cells(audit, name)),
        ]
        for name in sort_measures(audit)
    ]
    hints = [strip_markup(str(audit.report.legend.get(name, {}).get("meaning", ""))) for name in sort_measures(audit)]
    parts = [
        render_paragraph(audit.report.model),
        render_paragraph(" | ".join(format_audit_facts(audit))),
        html_table(header, rows, hints) if rows else render_paragraph(EMPTY),
        *map(render_paragraph, format_audit_footer(audit)),
    ]
    return wrap_html(parts)


def _collect_kinds(audit: Audit) -> list[str]:
    return list(dict.fromkeys(kind for line in audit.values() for kind in line.changes))


def _render_audit_tables(audit: Audit) -> Iterator[Table]:
    """Yield tables, the widest first."""
    yield _render_audit_table(audit, words=True, values=True)
    yield _render_audit_table(audit, claims=True, values=True)
    yield _render_audit_table(audit, claims=True)
    yield _render_audit_table(audit, brief=True, values=True)
    yield _render_audit_table(audit, brief=True)


def _render_audit_table(
    audit: Audit, words: bool = False, claims: bool = False, values: bool = False, brief: bool = False
) -> Table:
    """Return a table with a row per measure.

    Args:
        audit: the audit.
        words: add verdicts in words.
        claims: add the kinds of rescaling a measure claims to be invariant to.
        values: add the value of the network itself.
        brief: shorten the changes.
    """
    signed = any(format_audit_marks(line) for line in audit.values())
    table = build_ruled_table("measure")
    if signed:
        table.add_column("", overflow="fold")
    if values:
        add_number_column(table, "value")
    if claims:
        table.add_column("claims", overflow="fold")
    for kind in _collect_kinds(audit):
        add_number_column(table, KINDS.get(kind, kind))
        if words:
            table.add_column("verdict", overflow="fold")
    for name in sort_measures(audit):
        line = audit[name]
        head = [name, *([format_audit_marks(line)] * signed), *([format_number(line.reading.value)] * values)]
        head += [", ".join(kind for kind, change in line.changes.items() if change.claimed)] * claims
        cells = (
            _render_verdict_cells(audit, name)
            if words
            else (_render_joined_cell(line, kind, brief) for kind in _collect_kinds(audit))
        )
        table.add_row(*(Text(make_printable(cell)) for cell in head), *cells)
    return table


def _render_verdict_cells(audit: Audit, name: str) -> Iterator[Text]:
    line = audit[name]
    for kind in _collect_kinds(audit):
        change = line.changes[kind]
        yield Text(format_change(change, line.logarithmic))
        yield Text(change.verdict, style=STYLES.get(change.verdict, ""))


def _render_joined_cell(line: AuditLine, kind: str, brief: bool) -> Text:
    change = line.changes[kind]
    # A measure that moved without a claim shows both ends, since there is room for them.
    short = brief and (change.claimed or change.is_unchanged)
    told = format_change(change, line.logarithmic, short) or change.verdict
    stays = "stays " if change.is_unchanged and not (brief and change.moved) else ""
    word = {BROKEN: "MOVES ", WITHIN: "within errors "}.get(change.verdict, stays)
    return Text(word + told, style=STYLES.get(change.verdict, ""))


def _render_audit_lines(audit: Audit) -> Iterator[Text]:
    """Yield lines for terminals too narrow for a table."""
    for name in sort_measures(audit):
        line = audit[name]
        yield Text(
            make_printable(f"{name} {format_audit_marks(line)}".strip() + f": {format_number(line.reading.value)}")
        )
        for kind, change in line.changes.items():
            told = format_change(change, line.logarithmic)
            yield Text.assemble(
                f"  {KINDS.get(kind, kind)}: ",
                (change.verdict, STYLES.get(change.verdict, "")),
                f" ({told})" if told else "",
            )
