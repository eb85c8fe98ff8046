"""A report as tables of text, for the width there is."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from saltflat.report.text import fold_name, format_number, format_quantity, make_printable
from saltflat.report.view import (
    collect_layers,
    collect_notes,
    format_head_notes,
    format_report_facts,
    format_report_footer,
    format_report_marks,
)

if TYPE_CHECKING:
    from saltflat.report.reading import Reading
    from saltflat.report.report import Report

# A line under the header and nothing else, in characters that every terminal and every log file can hold.
RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)

# More rows than this are not read but scrolled past.
MOST_LAYERS = 20
HEADER = 14
SAMPLING = "+- (examples)"


class ReportTable:
    """The report as rich renders it: the layers beside the measures where they fit, else in tables of their own."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self.report
        yield Text(make_printable(report.model), style="bold")
        yield Text("\n".join([" | ".join(format_report_facts(report)), *format_head_notes(report)]) + "\n")
        layers = collect_layers(report.values())
        wide = render_totals(report, layers)
        if not report:
            yield Text("Nothing was measured.")
        elif len(layers) <= MOST_LAYERS and can_fit(wide, console, options):
            yield wide
        else:
            yield render_totals(report, [])
            yield from render_layer_tables(list(report.values()), layers, console, options)
        yield Text("")
        for line in format_report_footer(report):
            yield Text(line)


def render_text(content: RenderableType, width: int | None = None) -> str:
    """As text, for the terminal's width; 100 where there is no terminal."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False
    )
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def build_ruled_table(label: str) -> Table:
    """An empty table whose first column has names."""
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column(label, overflow="fold")
    return table


def add_number_column(table: Table, header: str) -> None:
    """A column of numbers."""
    table.add_column(Text(header), justify="right", overflow="fold")


def can_fit(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Whether nothing in it must be folded."""
    return Measurement.get(console, options.update(max_width=100_000), table).maximum <= options.max_width


def render_totals(report: Report, layers: Sequence[str]) -> Table:
    """Measures down, the network's value and the layers' across."""
    notes = collect_notes(report)
    signs = {name: format_report_marks(reading, notes) for name, reading in report.items()}
    table = build_ruled_table("measure")
    if any(signs.values()):
        table.add_column("", overflow="fold")
    add_number_column(table, "value")
    sampled = any(reading.sampling_stderr is not None for reading in report.values())
    if sampled:
        add_number_column(table, SAMPLING)
    for layer in layers:
        add_number_column(table, fold_name(layer, HEADER))
    for name, reading in report.items():
        cells = [make_printable(name), *([signs[name]] if any(signs.values()) else [])]
        cells.append(format_quantity(reading.value, reading.stderr))
        if sampled:
            cells.append(_format_sampling_error(reading))
        cells += [_format_layer_value(reading, layer) for layer in layers]
        table.add_row(*map(Text, cells))
    return table


def _format_sampling_error(reading: Reading) -> str:
    """The standard error over examples; nothing for what does not depend on them."""
    error = reading.sampling_stderr
    return format_number(float(f"{error:.2g}")) if error and not math.isnan(reading.value) else ""


def render_layer_tables(
    readings: Sequence[Reading], layers: Sequence[str], console: Console, options: ConsoleOptions
) -> RenderResult:
    """Layers down, measures across: as many tables as the width asks for."""
    rest = [reading for reading in readings if reading.layers]
    while rest:
        count = 1
        while count < len(rest) and can_fit(_layer_table(rest[: count + 1], layers), console, options):
            count += 1
        shown, rest = rest[:count], rest[count:]
        yield Text("")
        yield _layer_table(shown, layers)
        left = len(collect_layers(shown)) - MOST_LAYERS
        if left > 0:
            yield Text(f"... and {left} more layers with less: report.to_frame() has all.")


def _layer_table(readings: Sequence[Reading], layers: Sequence[str]) -> Table:
    table = build_ruled_table("layer")
    for reading in readings:
        add_number_column(table, fold_name(reading.name, HEADER))
    for layer in find_main_layers(readings, layers, MOST_LAYERS):
        table.add_row(Text(make_printable(layer)), *(Text(_format_layer_value(reading, layer)) for reading in readings))
    return table


def find_main_layers(readings: Sequence[Reading], layers: Sequence[str], count: int) -> list[str]:
    """The layers that matter most to some of the readings, in the order of the network."""
    weights: dict[str, float] = {}
    for reading in readings:
        sizes = {layer: abs(value) for layer, value in reading.layers.items()}
        largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
        for layer, size in sizes.items():
            # Undefined or infinite: a reader wants to see where.
            share = 2.0 if not math.isfinite(size) else size / largest if largest else 0.0
            weights[layer] = max(share, weights.get(layer, 0.0))
    chosen = set(sorted(weights, key=lambda layer: weights[layer], reverse=True)[:count])
    return [layer for layer in layers if layer in chosen]


def _format_layer_value(reading: Reading, layer: str) -> str:
    return format_number(reading.layers[layer]) if layer in reading.layers else ""
