"""saltflat compare, list and show: what needs no model"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.cli import options
from saltflat.cli.names import parse_names
from saltflat.cli.outputs import check_outputs, check_page_path, write_figure, write_result_page
from saltflat.cli.program import app
from saltflat.cli.screen import catch_stdout_errors, print_result
from saltflat.errors import OptionError
from saltflat.landscape import Landscape
from saltflat.report import Audit, Report
from saltflat.report.file import AUDIT, LANDSCAPE, REPORT, SPECTRUM, FileFormat, find_file_format
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
    found = saltflat.compare(*reports, names=parse_names(measures))
    print_result(found)
    if plot is not None:
        write_figure(found.plot(), plot)
    write_result_page(found, html)


@app.command(name="list")
def list_measures(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything.")] = False,
) -> None:
    """Print every measure: what it means, what leaves it unchanged, what it costs, where it comes from."""
    entries = saltflat.list_measures()
    if as_json:
        with catch_stdout_errors():
            typer.echo(json.dumps([{fact: getattr(each, fact) for fact in FACTS} for each in entries], indent=2))
    else:
        print_result(entries)


@app.command()
def show(
    report: Annotated[
        Path, typer.Argument(help="A report that measure wrote, an audit that audit wrote, a landscape or a spectrum.")
    ],
    html: options.Html = None,
) -> None:
    """Print a report, an audit, a landscape or a spectrum again."""
    check_page_path(html)
    kinds: dict[FileFormat, type[Report | Audit | Landscape | Spectrum]] = {
        REPORT: Report,
        AUDIT: Audit,
        LANDSCAPE: Landscape,
        SPECTRUM: Spectrum,
    }
    form = find_file_format(report, *kinds)
    found = kinds[form].load(report)
    if html is not None and isinstance(found, Landscape | Spectrum):
        raise OptionError(f"Got {form.what} with --html. Want a report or an audit. Do: draw it, with its plot().")
    print_result(found)
    if not isinstance(found, Landscape | Spectrum):
        write_result_page(found, html)
