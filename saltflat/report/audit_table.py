"""An audit as a table: a line per measure, with verdicts in words where they fit, or plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.report.audit_view import KINDS, format_audit_facts, format_audit_footer, format_audit_marks, sort_measures
from saltflat.report.change import BROKEN, MOVES, STAYS, WITHIN
from saltflat.report.change_text import format_change
from saltflat.report.page import render_html_table as html_table
from saltflat.report.page import render_paragraph, wrap_html
from saltflat.report.table import add_number_column, build_ruled_table, can_fit
from saltflat.report.text import format_number, make_printable

if TYPE_CHECKING:
    from rich.table import Table

    from saltflat.report.audit import Audit, AuditLine

EMPTY = "Nothing was measured."
STYLES = {BROKEN: "bold red", STAYS: "green", MOVES: "yellow"}


class AuditTable:
    """The audit as rich renders it."""

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
    """The same as a piece of HTML."""
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
    hints = [str(audit.report.legend.get(name, {}).get("meaning", "")) for name in sort_measures(audit)]
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
    """The widest first."""
    yield _render_audit_table(audit, words=True, values=True)
    yield _render_audit_table(audit, claims=True, values=True)
    yield _render_audit_table(audit, claims=True)
    yield _render_audit_table(audit, brief=True, values=True)
    yield _render_audit_table(audit, brief=True)


def _render_audit_table(
    audit: Audit, words: bool = False, claims: bool = False, values: bool = False, brief: bool = False
) -> Table:
    """A line per measure.

    Args:
        audit: what is shown.
        words: verdicts in words.
        claims: which kinds of rescaling a measure claims not to notice.
        values: of the network as it is.
        brief: changes in as few letters as can be.
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
    # Of what moved without a claim both ends are told, since there is room for them.
    short = brief and (change.claimed or change.is_unchanged)
    told = format_change(change, line.logarithmic, short) or change.verdict
    stays = "stays " if change.is_unchanged and not (brief and change.moved) else ""
    word = {BROKEN: "MOVES ", WITHIN: "within errors "}.get(change.verdict, stays)
    return Text(word + told, style=STYLES.get(change.verdict, ""))


def _render_audit_lines(audit: Audit) -> Iterator[Text]:
    """For terminals that no table fits into."""
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
