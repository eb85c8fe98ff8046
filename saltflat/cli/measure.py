"""saltflat measure, compare, list and show"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.audit.result import Audit
from saltflat.cli import inputs
from saltflat.cli.inputs import ModelDataSource, load_initial_weights
from saltflat.cli.program import (
    app,
    catch_stdout_errors,
    check_outputs,
    check_page_path,
    open_cli_session,
    parse_dtype,
    parse_names,
    print_result,
    reword_report,
    write_figure,
    write_result,
    write_result_page,
)
from saltflat.errors import OptionError
from saltflat.landscape.result import Landscape
from saltflat.results.files import AUDIT, LANDSCAPE, REPORT, SPECTRUM, FileFormat, find_file_format
from saltflat.results.report import Report
from saltflat.spectrum.result import Spectrum


@app.command()
def measure(
    model: inputs.Model,
    data: inputs.Data,
    model_args: inputs.ModelArgs = "{}",
    weights: inputs.Weights = None,
    data_dir: inputs.DataDir = Path("data"),
    split: inputs.Split = None,
    skip: inputs.Skip = 0,
    limit: inputs.Limit = None,
    normalize: inputs.Normalize = "none",
    loss: inputs.Loss = "cross_entropy",
    measures: inputs.Measures = None,
    columns: inputs.Columns = "exact",
    layers: inputs.Layers = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64; the model's own if not given.")] = None,
    device: inputs.Device = "cpu",
    memory: inputs.Memory = "1GiB",
    seed: inputs.Seed = 0,
    logits: inputs.Logits = "none",
    diagonal: inputs.Diagonal = "exact",
    initial: inputs.Initial = None,
    certificate: Annotated[bool, typer.Option(help="Check whether the curvature is the Hessian's own.")] = True,
    quiet: inputs.Quiet = False,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report into this file, .png, .svg or .pdf.")] = None,
    html: inputs.Html = None,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Measure a network on data: print a table, write a report."""
    check_outputs(out, plot, quiet, html)
    source = ModelDataSource.from_options(
        device,
        model=model,
        model_args=model_args,
        weights=weights,
        data=data,
        data_dir=data_dir,
        split=split,
        skip=skip,
        limit=limit,
        normalize=normalize,
    )
    precision = parse_dtype(dtype)
    with open_cli_session(show_traceback):
        network, notes = source.load_network(seed)
        examples = source.load_examples(network, precision)
        before, more = load_initial_weights(network, initial)
        with source.wrap_errors():
            report = saltflat.measure(
                network,
                examples,
                loss,
                parse_names(measures),
                columns=columns,
                layers=parse_names(layers),
                memory=memory,
                dtype=precision,
                seed=seed,
                progress=False if quiet else None,
                logits=logits,
                diagonal=diagonal,
                initial=before,
                certificate=certificate,
            )
    report = dataclasses.replace(reword_report(report), notes=(*notes, *more, *report.notes, source.format_data_note()))
    if not quiet:
        print_result(report)
    write_result(report, out, plot, quiet)
    write_result_page(report, html, quiet)


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
    html: inputs.Html = None,
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
    html: inputs.Html = None,
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
        raise OptionError(
            f"Expected a report or an audit, but got {form.what} with --html. Try drawing it, with its plot()."
        )
    print_result(found)
    if not isinstance(found, Landscape | Spectrum):
        write_result_page(found, html)
