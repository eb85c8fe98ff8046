"""Render a comparison as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.render.report import format_report_facts, render_paragraph, wrap_html
from saltflat.render.report import render_html_table as html_table
from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    can_fit,
    format_factor,
    format_number,
    format_quantity,
    format_short,
    make_printable,
)
from saltflat.results.verdict import SAME

if TYPE_CHECKING:
    from rich.table import Table

    from saltflat.results.comparison import Comparison, Contrast


EMPTY = "Nothing to compare: the reports have no readings."


class ComparisonTable:
    """Rich renderable of a comparison."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        for line in [make_printable(comparison.answer), "", *_format_report_headers(comparison), ""]:
            yield Text(line)
        with_differences = with_marks = True
        if not comparison:
            yield Text(EMPTY)
        else:
            tables: list[Table] = []
            if len(comparison.reports) == 2:
                compact = [_render_compact_table(comparison, with_intervals) for with_intervals in (True, False)]
                tables = [_render_wide_table(comparison), *compact]
            fitting = [table for table in [*tables, _render_tall_table(comparison)] if can_fit(table, console, options)]
            with_marks = not (fitting and any(fitting[0] is table for table in tables[1:]))
            with_differences = bool(fitting) and with_marks
            yield fitting[0] if fitting else Text("\n".join(_format_comparison_lines(comparison)))
        for line in ["", *_format_comparison_footer(comparison, with_differences, with_marks)]:
            yield Text(line)


def render_comparison_html(comparison: Comparison) -> str:
    """Return the comparison as HTML."""
    header = ["measure", "unchanged by", "report", "value", "difference", name_ratio(comparison), "verdict", "flatter"]
    rows = [row for contrast in comparison.values() for row in _format_contrast_rows(contrast)]
    parts = [
        render_paragraph(make_printable(comparison.answer)),
        *map(render_paragraph, _format_report_headers(comparison)),
        html_table(header, rows, [""] * len(rows)) if rows else render_paragraph(EMPTY),
        *map(render_paragraph, _format_comparison_footer(comparison)),
    ]
    return wrap_html(parts)


def _format_report_headers(comparison: Comparison) -> list[str]:
    return [
        make_printable(f"{label}: {report.model} | {' | '.join(format_report_facts(report))}")
        for label, report in comparison.reports.items()
    ]


def _format_comparison_footer(
    comparison: Comparison, with_differences: bool = True, with_marks: bool = True
) -> list[str]:
    """Return what could speak against the comparison, and how to read a table with or without differences and ``?``."""
    lines = [f"Careful: {doubt}" for doubt in comparison.doubts] or ["Nothing is known against comparing these."]
    how = "paired: all reports saw the same examples" if comparison.paired else "of independent samples of examples"
    if any(error is not None for contrast in comparison.values() for error in contrast.errors.values()):
        shown = "+- after a difference is its standard error"
        lines.append(f"{shown if with_differences else 'Verdicts use standard errors of differences'} ({how}).")
        lines.append("Verdicts are about these networks; other seeds may differ.")
    if len(comparison.reports) > 2:
        first = next(iter(comparison.reports))
        lines.append(f"Ratios and verdicts compare with the first report that has the measure: {first} if it does.")
    if with_marks and any(contrast.flattest and not contrast.sure for contrast in comparison.values()):
        lines.append("? by the values alone: some of their errors are unknown")
    return [make_printable(line) for line in lines]


def format_invariances(contrast: Contrast) -> str:
    """Return what may be rescaled without changing the measure, in a word."""
    return {2: "layers, units", 1: "layers"}.get(len(contrast.invariant_to), "")


def format_difference(contrast: Contrast, label: str) -> str:
    """Format the difference of a report from the first, with its standard error."""
    return format_quantity(contrast.differences[label], contrast.errors[label] or None)


def name_ratio(comparison: Comparison) -> str:
    """Return the header of ratios, which says what their intervals are if there are any."""
    found = (format_ratio(each, label) for each in comparison.values() for label in each.verdicts)
    return "ratio [99 %]" if any("[" in each for each in found) else "ratio"


def format_ratio(contrast: Contrast, label: str, with_interval: bool = True) -> str:
    """Format the ratio of a report to the first, with its 99 % interval where one is known."""
    interval = contrast.compute_ratio_interval(label) if with_interval else None
    ratio = format_number(contrast.ratios[label])
    if interval is None or interval[0] == interval[1] or contrast.verdicts[label] == SAME:
        return ratio
    return f"{ratio} [{', '.join(map(_format_end, interval))}]"


def _format_end(value: float) -> str:
    """Format the end of an interval of ratios, so that only 1 prints as 1."""
    text = format_short(value, 3)
    return format_factor(value) if float(text) == 1 else text


def _format_flattest(contrast: Contrast) -> str:
    return "" if contrast.flattest is None else contrast.flattest + "?" * (not contrast.sure)


def _format_contrast_rows(contrast: Contrast) -> Iterator[list[str]]:
    """Yield a row per report; the first has no difference."""
    for label, reading in contrast.readings.items():
        against = ["", "", ""]
        if label in contrast.verdicts:
            against = [
                format_difference(contrast, label),
                format_ratio(contrast, label),
                contrast.verdicts[label],
            ]
        first = label not in contrast.verdicts
        head = [contrast.name, format_invariances(contrast)] if first else ["", ""]
        value = format_quantity(reading.value, reading.stderr)
        yield [*head, label, value, *against, _format_flattest(contrast) if first else ""]


def _render_tall_table(comparison: Comparison) -> Table:
    table = build_ruled_table("measure")
    table.add_column("unchanged by", overflow="fold")
    table.add_column("report", overflow="fold")
    for header in ("value", "difference", name_ratio(comparison)):
        add_number_column(table, header)
    table.add_column("verdict", overflow="fold")
    table.add_column("flatter", overflow="fold")
    for contrast in comparison.values():
        for row in _format_contrast_rows(contrast):
            table.add_row(*(Text(make_printable(cell)) for cell in row))
    return table


def _format_comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield lines for terminals too narrow for a table."""
    for contrast in comparison.values():
        flatter = _format_flattest(contrast)
        yield make_printable(contrast.name + (f" (flatter: {flatter})" if flatter else ""))
        for _, _, label, value, _, ratio, verdict, _ in _format_contrast_rows(contrast):
            yield make_printable(f"  {label}: {value}" + (f", ratio {ratio}, {verdict}" if verdict else ""))


def _render_wide_table(comparison: Comparison) -> Table:
    first, second = comparison.reports
    table = build_ruled_table("measure")
    table.add_column("unchanged by", overflow="fold")
    for header in (first, second, "difference", name_ratio(comparison)):
        add_number_column(table, make_printable(header))
    table.add_column("verdict", overflow="fold")
    table.add_column("flatter", overflow="fold")
    for contrast in comparison.values():
        against = [f"only in {label}" for label in contrast.readings] if len(contrast.readings) == 1 else []
        for label, verdict in contrast.verdicts.items():
            against = [format_difference(contrast, label), format_ratio(contrast, label), verdict]
        against = against if len(against) == 3 else ["", "", *against]
        cells = [
            contrast.name,
            format_invariances(contrast),
            *_format_values(comparison, contrast),
            *against,
            _format_flattest(contrast),
        ]
        table.add_row(*(Text(make_printable(cell)) for cell in cells))
    return table


def _render_compact_table(comparison: Comparison, with_intervals: bool) -> Table:
    """Return a table without differences, with the flatter report as the verdict."""
    table = build_ruled_table("measure")
    table.add_column("unchanged by", overflow="fold")
    for header in (*comparison.reports, name_ratio(comparison) if with_intervals else "ratio"):
        add_number_column(table, make_printable(header))
    table.add_column("verdict", overflow="fold")
    for contrast in comparison.values():
        ratio, verdict = "", "".join(f"only in {label}" for label in contrast.readings)
        for label, said in contrast.verdicts.items():
            ratio, verdict = format_ratio(contrast, label, with_intervals), said
        flatter = _format_flattest(contrast)
        last = f"{flatter} flatter" if flatter and contrast.sure else verdict
        cells = [contrast.name, format_invariances(contrast), *_format_values(comparison, contrast), ratio, last]
        table.add_row(*(Text(make_printable(cell)) for cell in cells))
    return table


def _format_values(comparison: Comparison, contrast: Contrast) -> list[str]:
    known = [contrast.readings.get(label) for label in comparison.reports]
    return ["" if each is None else format_quantity(each.value, each.stderr) for each in known]
