"""Render a report as text tables and as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    can_fit,
    fold_name,
    format_number,
    format_quantity,
    join_words,
    make_printable,
    strip_markup,
)

if TYPE_CHECKING:
    from saltflat.results.report import Reading, Report


SIGNS = {
    "~": "an estimate, a bound or the result of a search",
    "!": "the solver stopped before it was done",
}


def format_report_facts(report: Report) -> list[str]:
    """Return what was measured, and how, as the parts of a line."""
    settings = report.settings
    kind = f" ({settings['loss']})" if "loss" in settings else ""
    said = [f"{report.examples} example{'s' * (report.examples != 1)}", f"loss {format_number(report.loss)}{kind}"]
    if report.accuracy is not None:
        said.append(f"accuracy {report.accuracy:.2%}")
    if report.gradient_norm is not None:
        said.append(f"gradient norm {format_number(report.gradient_norm, 3)}")
    if "columns" in settings:
        said.append(f"columns {settings['columns']}")
    if "dtype" in settings:
        said.append(str(settings["dtype"]))
    said += [report.device, f"{format_number(report.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def format_head_notes(report: Report) -> list[str]:
    """Return the notes to show before the numbers."""
    return [make_printable(f"Note: {note}") for note in report.notes]


def collect_layers(readings: Iterable[Reading]) -> list[str]:
    """Return every layer that has a value, in the order of the network as far as the readings show it."""
    return list(dict.fromkeys(layer for reading in readings for layer in reading.layers))


def collect_notes(report: Report) -> list[str]:
    """Return the notes of all readings, each once; note 1 is the first."""
    return list(dict.fromkeys(note for reading in report.values() for note in reading.notes))


def format_signs(reading: Reading) -> str:
    """Return the signs of a reading that is not exact or not converged; an undefined one has none."""
    return "" if math.isnan(reading.value) else "~" * (not reading.exact) + "!" * (not reading.converged)


def format_report_marks(reading: Reading, notes: list[str]) -> str:
    """Return the signs of a reading and the numbers of its notes."""
    return format_signs(reading) + "".join(f"[{1 + notes.index(note)}]" for note in dict.fromkeys(reading.notes))


def format_report_footer(report: Report) -> list[str]:
    """Return the lines below the numbers: signs, notes, what was left out, and the certificate."""
    used = "".join(map(format_signs, report.values()))
    lines = [f"{sign} {meaning}" for sign, meaning in SIGNS.items() if sign in used]
    lines += [f"[{count}] {note}" for count, note in enumerate(collect_notes(report), 1)]
    if any(reading.sampling_stderr is not None for reading in report.values()):
        lines.append("+- (examples): standard error over the choice of the examples; elsewhere +- is over random draws")
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    lines += [f"Left out: {join_words(names)}: {reason}" for reason, names in by_reason.items()]
    return [make_printable(line) for line in [*lines, format_certificate(report.certificate)]]


def format_certificate(certificate: Mapping[str, object] | None) -> str:
    """Return a sentence on whether the Gauss-Newton blocks equal the Hessian's."""
    if certificate is None:
        return "Certificate: not requested."
    if certificate.get("failed"):
        return f"Certificate: could not be computed: {certificate['failed']}."
    seen = certificate.get("examples", "?")
    gap = certificate.get("gap", math.nan)
    verdict = "are" if certificate.get("holds") else "are NOT"
    shown = f"{gap:.1e}" if isinstance(gap, float) else str(gap)
    return (
        f"Certificate: the layers' Gauss-Newton blocks {verdict} the Hessian's (largest gap {shown}, {seen} examples)."
    )


# Colors are inherited from the page, so that it is readable in light and dark themes.
STYLE = """
.saltflat { overflow-x: auto; font-variant-numeric: tabular-nums; }
.saltflat table { border-collapse: collapse; margin: 0.6em 0; }
.saltflat th, .saltflat td { padding: 0.2em 0.7em; text-align: right; vertical-align: baseline; background: none; }
.saltflat td { white-space: nowrap; }
.saltflat thead th { border-bottom: 1px solid currentColor; vertical-align: bottom; }
.saltflat th:first-child, .saltflat td:first-child { text-align: left; }
.saltflat td:first-child { font-family: monospace; }
.saltflat p { margin: 0.2em 0; max-width: 60em; text-align: left; }
"""


def render_report_html(report: Report) -> str:
    """Return the report as HTML: title, facts, one table with all layers, and the lines below it."""
    notes, layers = collect_notes(report), collect_layers(report.values())
    rows = [
        [
            name,
            format_report_marks(reading, notes),
            format_quantity(reading.value, reading.stderr),
            *(format_number(reading.layers[layer]) if layer in reading.layers else "" for layer in layers),
        ]
        for name, reading in report.items()
    ]
    hints = [strip_markup(str(report.legend.get(name, {}).get("meaning", ""))) for name in report]
    parts = [
        f"<p><b>{escape_text(report.model)}</b></p>",
        render_paragraph(" | ".join(format_report_facts(report))),
        render_html_table(["measure", "", "value", *layers], rows, hints)
        if rows
        else render_paragraph("Nothing was measured."),
        *map(render_paragraph, format_report_footer(report)),
    ]
    return wrap_html(parts)


def wrap_html(parts: Iterable[str]) -> str:
    """Return the parts in one element, with their style."""
    return f'<div class="saltflat"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def render_html_table(header: Sequence[str], rows: Sequence[Sequence[str]], hints: Sequence[str]) -> str:
    """Return a table; a hint is the tooltip of a row."""
    head = "".join(f"<th>{escape_text(each)}</th>" for each in header)
    body = "\n".join(
        f'<tr title="{escape_text(hint)}">' + "".join(f"<td>{escape_text(each)}</td>" for each in row) + "</tr>"
        for row, hint in zip(rows, hints, strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def render_paragraph(text: str) -> str:
    """Return a text as an HTML paragraph."""
    return f"<p>{escape_text(text)}</p>"


def escape_text(text: str) -> str:
    """Escape a text for HTML."""
    return escape(make_printable(text), quote=True)


# Nobody reads more rows than this.
MOST_LAYERS = 20
HEADER = 14
SAMPLING = "+- (examples)"


class ReportTable:
    """Rich renderable of a report: the layers beside the measures where they fit, else in separate tables."""

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


def render_totals(report: Report, layers: Sequence[str]) -> Table:
    """Return a table with a row per measure, and columns for the network and the layers."""
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
    """Format the standard error over examples; empty for measures that do not depend on them."""
    error = reading.sampling_stderr
    return format_number(float(f"{error:.2g}")) if error and not math.isnan(reading.value) else ""


def render_layer_tables(
    readings: Sequence[Reading], layers: Sequence[str], console: Console, options: ConsoleOptions
) -> RenderResult:
    """Yield tables with a row per layer and a column per measure, as many as the width requires."""
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
    """Return the layers that contribute most to any of the readings, in the order of the network."""
    weights: dict[str, float] = {}
    for reading in readings:
        sizes = {layer: abs(value) for layer, value in reading.layers.items()}
        largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
        for layer, size in sizes.items():
            # Undefined or infinite layers come first: a reader wants to see them.
            share = 2.0 if not math.isfinite(size) else size / largest if largest else 0.0
            weights[layer] = max(share, weights.get(layer, 0.0))
    chosen = set(sorted(weights, key=lambda layer: weights[layer], reverse=True)[:count])
    return [layer for layer in layers if layer in chosen]


def _format_layer_value(reading: Reading, layer: str) -> str:
    return format_number(reading.layers[layer]) if layer in reading.layers else ""
