"""A report as a piece of HTML: tables only, nothing fetched, every name and note escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from saltflat.report.text import format_number, format_quantity, make_printable
from saltflat.report.view import (
    collect_layers,
    collect_notes,
    format_report_facts,
    format_report_footer,
    format_report_marks,
)

if TYPE_CHECKING:
    from saltflat.report.report import Report

# Colours are the page's own, so that it can be read on light and on dark.
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
    """Title, facts, one table with all layers, and what stands below it."""
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
    hints = [str(report.legend.get(name, {}).get("meaning", "")) for name in report]
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
    """The pieces with their style around them."""
    return f'<div class="saltflat"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def render_html_table(header: Sequence[str], rows: Sequence[Sequence[str]], hints: Sequence[str]) -> str:
    """A table; the hints show when one points at the first cell of a row."""
    head = "".join(f"<th>{escape_text(each)}</th>" for each in header)
    body = "\n".join(
        f'<tr title="{escape_text(hint)}">' + "".join(f"<td>{escape_text(each)}</td>" for each in row) + "</tr>"
        for row, hint in zip(rows, hints, strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def render_paragraph(text: str) -> str:
    return f"<p>{escape_text(text)}</p>"


def escape_text(text: str) -> str:
    """Text that a browser shows as it is."""
    return escape(make_printable(text), quote=True)
