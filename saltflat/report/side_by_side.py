"""A comparison as a table: a line per measure for two reports, else a line per measure and report, else plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.report.page import framed, paragraph
from saltflat.report.page import table as html_table
from saltflat.report.table import add_numbers, fits, ruled
from saltflat.report.text import number, printable, quantity
from saltflat.report.view import facts

if TYPE_CHECKING:
    from rich.table import Table

    from saltflat.report.compare import Comparison, Contrast


EMPTY = "Nothing to compare: the reports have no readings."


class SideBySide:
    """The comparison as rich renders it."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        for line in [*_tops(comparison), ""]:
            yield Text(line)
        if not comparison:
            yield Text(EMPTY)
        else:
            tables = [_wide(comparison)] if len(comparison.reports) == 2 else []
            fitting = [table for table in [*tables, _tall(comparison)] if fits(table, console, options)]
            yield fitting[0] if fitting else Text("\n".join(_lines(comparison)))
        for line in ["", *_below(comparison)]:
            yield Text(line)


def page_of(comparison: Comparison) -> str:
    """The same as a piece of HTML."""
    header = ["measure", "report", "value", "difference", "ratio", "verdict", "flatter"]
    rows = [row for contrast in comparison.values() for row in _rows(contrast)]
    parts = [
        *map(paragraph, _tops(comparison)),
        html_table(header, rows, [""] * len(rows)) if rows else paragraph(EMPTY),
        *map(paragraph, _below(comparison)),
    ]
    return framed(parts)


def _tops(comparison: Comparison) -> list[str]:
    return [
        printable(f"{label}: {report.model} | {' | '.join(facts(report))}")
        for label, report in comparison.reports.items()
    ]


def _below(comparison: Comparison) -> list[str]:
    lines = [f"Careful: {doubt}" for doubt in comparison.doubts] or ["Nothing is known against comparing these."]
    if any(contrast.flattest and not contrast.sure for contrast in comparison.values()):
        lines.append("? by the values alone: some of their errors are not known")
    return [printable(line) for line in lines]


def _flatter(contrast: Contrast) -> str:
    return "" if contrast.flattest is None else contrast.flattest + "?" * (not contrast.sure)


def _rows(contrast: Contrast) -> Iterator[list[str]]:
    """A line per report; the first has no difference from itself."""
    for label, reading in contrast.readings.items():
        against = ["", "", ""]
        if label in contrast.verdicts:
            against = [number(contrast.differences[label]), number(contrast.ratios[label]), contrast.verdicts[label]]
        name, flatter = ("", "") if label in contrast.verdicts else (contrast.name, _flatter(contrast))
        yield [name, label, quantity(reading.value, reading.stderr), *against, flatter]


def _tall(comparison: Comparison) -> Table:
    table = ruled("measure")
    table.add_column("report", overflow="fold")
    for header in ("value", "difference", "ratio"):
        add_numbers(table, header)
    table.add_column("verdict", overflow="fold")
    table.add_column("flatter", overflow="fold")
    for contrast in comparison.values():
        for row in _rows(contrast):
            table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _lines(comparison: Comparison) -> Iterator[str]:
    """For terminals that no table fits into."""
    for contrast in comparison.values():
        flatter = _flatter(contrast)
        yield printable(contrast.name + (f" (flatter: {flatter})" if flatter else ""))
        for _, label, value, _, ratio, verdict, _ in _rows(contrast):
            yield printable(f"  {label}: {value}" + (f", ratio {ratio}, {verdict}" if verdict else ""))


def _wide(comparison: Comparison) -> Table:
    first, second = comparison.reports
    table = ruled("measure")
    for header in (first, second, "difference", "ratio"):
        add_numbers(table, printable(header))
    table.add_column("verdict", overflow="fold")
    table.add_column("flatter", overflow="fold")
    for contrast in comparison.values():
        values = [
            quantity(contrast.readings[label].value, contrast.readings[label].stderr)
            if label in contrast.readings
            else ""
            for label in (first, second)
        ]
        against = [f"only in {label}" for label in contrast.readings] if len(contrast.readings) == 1 else []
        for label, verdict in contrast.verdicts.items():
            against = [number(contrast.differences[label]), number(contrast.ratios[label]), verdict]
        cells = [contrast.name, *values, *(against if len(against) == 3 else ["", "", *against]), _flatter(contrast)]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
