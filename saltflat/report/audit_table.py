"""An audit as a table: a line per measure, with verdicts in words where they fit, or plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.report.audit_view import KINDS, below, facts, marks, ordered
from saltflat.report.change import BROKEN, MOVES, STAYS, WITHIN
from saltflat.report.change_text import change_told
from saltflat.report.page import framed, paragraph
from saltflat.report.page import table as html_table
from saltflat.report.table import add_numbers, fits, ruled
from saltflat.report.text import number, printable

if TYPE_CHECKING:
    from rich.table import Table

    from saltflat.report.audit import Audit, AuditLine

EMPTY = "Nothing was measured."
STYLES = {BROKEN: "bold red", STAYS: "green", MOVES: "yellow"}


class Audited:
    """The audit as rich renders it."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        audit = self.audit
        yield Text(printable(audit.report.model), style="bold")
        yield Text(" | ".join(facts(audit)) + "\n")
        if not audit:
            yield Text(EMPTY)
        else:
            fitting = [table for table in _tables(audit) if fits(table, console, options)]
            yield fitting[0] if fitting else Text("\n").join(_lines(audit))
        yield Text("")
        for line in below(audit):
            yield Text(line)


def page_of(audit: Audit) -> str:
    """The same as a piece of HTML."""
    kinds = _kinds(audit)
    header = ["measure", "", "value", *(cell for kind in kinds for cell in (KINDS.get(kind, kind), "verdict"))]
    rows = [
        [name, marks(audit[name]), number(audit[name].reading.value), *(cell.plain for cell in _cells(audit, name))]
        for name in ordered(audit)
    ]
    hints = [str(audit.report.legend.get(name, {}).get("meaning", "")) for name in ordered(audit)]
    parts = [
        paragraph(audit.report.model),
        paragraph(" | ".join(facts(audit))),
        html_table(header, rows, hints) if rows else paragraph(EMPTY),
        *map(paragraph, below(audit)),
    ]
    return framed(parts)


def _kinds(audit: Audit) -> list[str]:
    return list(dict.fromkeys(kind for line in audit.values() for kind in line.changes))


def _tables(audit: Audit) -> Iterator[Table]:
    """The widest first."""
    yield _table(audit, words=True, values=True)
    yield _table(audit, claims=True, values=True)
    yield _table(audit, claims=True)
    yield _table(audit, brief=True, values=True)
    yield _table(audit, brief=True)


def _table(audit: Audit, words: bool = False, claims: bool = False, values: bool = False, brief: bool = False) -> Table:
    """A line per measure.

    Args:
        audit: what is shown.
        words: verdicts in words.
        claims: which kinds of rescaling a measure claims not to notice.
        values: of the network as it is.
        brief: changes in as few letters as can be.
    """
    signed = any(marks(line) for line in audit.values())
    table = ruled("measure")
    if signed:
        table.add_column("", overflow="fold")
    if values:
        add_numbers(table, "value")
    if claims:
        table.add_column("claims", overflow="fold")
    for kind in _kinds(audit):
        add_numbers(table, KINDS.get(kind, kind))
        if words:
            table.add_column("verdict", overflow="fold")
    for name in ordered(audit):
        line = audit[name]
        head = [name, *([marks(line)] * signed), *([number(line.reading.value)] * values)]
        head += [", ".join(kind for kind, change in line.changes.items() if change.claimed)] * claims
        cells = _cells(audit, name) if words else (_joined(line, kind, brief) for kind in _kinds(audit))
        table.add_row(*(Text(printable(cell)) for cell in head), *cells)
    return table


def _cells(audit: Audit, name: str) -> Iterator[Text]:
    line = audit[name]
    for kind in _kinds(audit):
        change = line.changes[kind]
        yield Text(change_told(change, line.logarithmic))
        yield Text(change.verdict, style=STYLES.get(change.verdict, ""))


def _joined(line: AuditLine, kind: str, brief: bool) -> Text:
    change = line.changes[kind]
    # Of what moved without a claim both ends are told, since there is room for them.
    short = brief and (change.claimed or change.stays)
    told = change_told(change, line.logarithmic, short) or change.verdict
    stays = "stays " if change.stays and not (brief and change.moved) else ""
    word = {BROKEN: "MOVES ", WITHIN: "within errors "}.get(change.verdict, stays)
    return Text(word + told, style=STYLES.get(change.verdict, ""))


def _lines(audit: Audit) -> Iterator[Text]:
    """For terminals that no table fits into."""
    for name in ordered(audit):
        line = audit[name]
        yield Text(printable(f"{name} {marks(line)}".strip() + f": {number(line.reading.value)}"))
        for kind, change in line.changes.items():
            told = change_told(change, line.logarithmic)
            yield Text.assemble(
                f"  {KINDS.get(kind, kind)}: ",
                (change.verdict, STYLES.get(change.verdict, "")),
                f" ({told})" if told else "",
            )
