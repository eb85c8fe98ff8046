"""saltflat compare, list and show: what needs no model"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.cli.names import names_from
from saltflat.cli.program import app
from saltflat.cli.screen import show_on_screen, stdout_checked
from saltflat.report import Audit, Report
from saltflat.report.file import AUDIT, REPORT, form_of

FACTS = ("name", "meaning", "formula", "invariant_to", "smaller", "needs", "reference", "options")


@app.command()
def compare(
    reports: Annotated[list[Path], typer.Argument(help="Two or more reports that measure wrote.")],
    measures: Annotated[
        list[str] | None, typer.Option(help="Names, with commas or one by one; all if not given.")
    ] = None,
) -> None:
    """Print reports side by side, and which differences are real."""
    show_on_screen(saltflat.compare(*reports, names=names_from(measures)))


@app.command(name="list")
def list_measures(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything.")] = False,
) -> None:
    """Print every measure: what it means, what leaves it unchanged, where it comes from."""
    entries = saltflat.catalogue()
    if as_json:
        with stdout_checked():
            typer.echo(json.dumps([{fact: getattr(each, fact) for fact in FACTS} for each in entries], indent=2))
    else:
        show_on_screen(entries)


@app.command()
def show(
    report: Annotated[Path, typer.Argument(help="A report that measure wrote, or an audit that audit wrote.")],
) -> None:
    """Print a report or an audit again."""
    kind = Audit if form_of(report, REPORT, AUDIT) is AUDIT else Report
    show_on_screen(kind.load(report))
