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
        for line in [printable(comparison.answer), "", *_tops(comparison), ""]:
            yield Text(line)
        compact = False
        if not comparison:
            yield Text(EMPTY)
        else:
            tables = [_wide(comparison), _compact(comparison)] if len(comparison.reports) == 2 else []
            fitting = [table for table in [*tables, _tall(comparison)] if fits(table, console, options)]
            compact = bool(tables) and bool(fitting) and fitting[0] is tables[1]
            yield fitting[0] if fitting else Text("\n".join(_lines(comparison)))
        for line in ["", *_below(comparison, compact)]:
            yield Text(line)


def page_of(comparison: Comparison) -> str:
    """The same as a piece of HTML."""
    header = ["measure", "unchanged by", "report", "value", "difference", "ratio", "verdict", "flatter"]
    rows = [row for contrast in comparison.values() for row in _rows(contrast)]
    parts = [
        paragraph(printable(comparison.answer)),
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


def _below(comparison: Comparison, compact: bool = False) -> list[str]:
    lines = [f"Careful: {doubt}" for doubt in comparison.doubts] or ["Nothing is known against comparing these."]
    how = "paired: all reports saw the same examples" if comparison.paired else "of independent samples of examples"
    if any(error is not None for contrast in comparison.values() for error in contrast.errors.values()):
        shown = "+- after a difference is its standard error"
        lines.append(f"{'Verdicts use standard errors of differences' if compact else shown} ({how}).")
    if not compact and any(contrast.flattest and not contrast.sure for contrast in comparison.values()):
        lines.append("? by the values alone: some of their errors are not known")
    return [printable(line) for line in lines]


def unchanged_by(contrast: Contrast) -> str:
    """What may be rescaled without changing the measure, in a word."""
    return {2: "layers, units", 1: "layers"}.get(len(contrast.invariant_to), "")


def difference_with_error(contrast: Contrast, label: str) -> str:
    return quantity(contrast.differences[label], contrast.errors[label] or None)


def _flatter(contrast: Contrast) -> str:
    return "" if contrast.flattest is None else contrast.flattest + "?" * (not contrast.sure)


def _rows(contrast: Contrast) -> Iterator[list[str]]:
    """A line per report; the first has no difference from itself."""
    for label, reading in contrast.readings.items():
        against = ["", "", ""]
        if label in contrast.verdicts:
            against = [difference_with_error(contrast, label), number(contrast.ratios[label]), contrast.verdicts[label]]
        first = label not in contrast.verdicts
        head = [contrast.name, unchanged_by(contrast)] if first else ["", ""]
        value = quantity(reading.value, reading.stderr)
        yield [*head, label, value, *against, _flatter(contrast) if first else ""]


def _tall(comparison: Comparison) -> Table:
    table = ruled("measure")
    table.add_column("unchanged by", overflow="fold")
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
        for _, _, label, value, _, ratio, verdict, _ in _rows(contrast):
            yield printable(f"  {label}: {value}" + (f", ratio {ratio}, {verdict}" if verdict else ""))


def _wide(comparison: Comparison) -> Table:
    first, second = comparison.reports
    table = ruled("measure")
    table.add_column("unchanged by", overflow="fold")
    for header in (first, second, "difference", "ratio"):
        add_numbers(table, printable(header))
    table.add_column("verdict", overflow="fold")
    table.add_column("flatter", overflow="fold")
    for contrast in comparison.values():
        against = [f"only in {label}" for label in contrast.readings] if len(contrast.readings) == 1 else []
        for label, verdict in contrast.verdicts.items():
            against = [difference_with_error(contrast, label), number(contrast.ratios[label]), verdict]
        against = against if len(against) == 3 else ["", "", *against]
        cells = [contrast.name, unchanged_by(contrast), *_values(comparison, contrast), *against, _flatter(contrast)]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _compact(comparison: Comparison) -> Table:
    """The same without differences, and with the flatter one as the verdict."""
    table = ruled("measure")
    table.add_column("unchanged by", overflow="fold")
    for header in (*comparison.reports, "ratio"):
        add_numbers(table, printable(header))
    table.add_column("verdict", overflow="fold")
    for contrast in comparison.values():
        ratio, verdict = "", "".join(f"only in {label}" for label in contrast.readings)
        for label, said in contrast.verdicts.items():
            ratio, verdict = number(contrast.ratios[label]), said
        flatter = _flatter(contrast)
        last = f"{flatter} flatter" if flatter and contrast.sure else verdict
        cells = [contrast.name, unchanged_by(contrast), *_values(comparison, contrast), ratio, last]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _values(comparison: Comparison, contrast: Contrast) -> list[str]:
    known = [contrast.readings.get(label) for label in comparison.reports]
    return ["" if each is None else quantity(each.value, each.stderr) for each in known]
