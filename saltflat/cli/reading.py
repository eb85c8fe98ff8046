"""saltflat compare, list and show: what needs no model"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.cli import options
from saltflat.cli.names import names_from
from saltflat.cli.outputs import check_outputs, check_page, draw, keep_page
from saltflat.cli.program import app
from saltflat.cli.screen import show_on_screen, stdout_checked
from saltflat.errors import OptionError
from saltflat.landscape import Landscape
from saltflat.report import Audit, Report
from saltflat.report.file import AUDIT, LANDSCAPE, REPORT, SPECTRUM, Form, form_of
from saltflat.spectrum import Spectrum

FACTS = ("name", "meaning", "formula", "invariant_to", "smaller", "needs", "reference", "options", "cost")


@app.command()
def compare(
    reports: Annotated[list[Path], typer.Argument(help="Two or more reports that measure wrote.")],
    measures: Annotated[
        list[str] | None, typer.Option(help="Names, with commas or one by one; all if not given.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the ratios with their 99 % intervals into this file: png, svg or pdf.")
    ] = None,
    html: options.Html = None,
) -> None:
    """Print which network is flatter, the reports side by side, and which differences are real."""
    check_outputs(None, plot, quiet=False, html=html)
    found = saltflat.compare(*reports, names=names_from(measures))
    show_on_screen(found)
    if plot is not None:
        draw(found.plot(), plot)
    keep_page(found, html)


@app.command(name="list")
def list_measures(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything.")] = False,
) -> None:
    """Print every measure: what it means, what leaves it unchanged, what it costs, where it comes from."""
    entries = saltflat.catalogue()
    if as_json:
        with stdout_checked():
            typer.echo(json.dumps([{fact: getattr(each, fact) for fact in FACTS} for each in entries], indent=2))
    else:
        show_on_screen(entries)


@app.command()
def show(
    report: Annotated[
        Path, typer.Argument(help="A report that measure wrote, an audit that audit wrote, a landscape or a spectrum.")
    ],
    html: options.Html = None,
) -> None:
    """Print a report, an audit, a landscape or a spectrum again."""
    check_page(html)
    kinds: dict[Form, type[Report | Audit | Landscape | Spectrum]] = {
        REPORT: Report,
        AUDIT: Audit,
        LANDSCAPE: Landscape,
        SPECTRUM: Spectrum,
    }
    form = form_of(report, *kinds)
    found = kinds[form].load(report)
    if html is not None and isinstance(found, Landscape | Spectrum):
        raise OptionError(f"Got {form.what} with --html. Want a report or an audit. Do: draw it, with its plot().")
    show_on_screen(found)
    if not isinstance(found, Landscape | Spectrum):
        keep_page(found, html)
