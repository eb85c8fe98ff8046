"""saltflat measure"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.cli import options
from saltflat.cli.names import parse_dtype, parse_names
from saltflat.cli.outputs import check_outputs, write_result, write_result_page
from saltflat.cli.program import app, open_cli_session
from saltflat.cli.screen import print_result
from saltflat.cli.source import ModelDataSource, load_initial_weights
from saltflat.cli.wording import reword_report


@app.command()
def measure(
    model: options.Model,
    data: options.Data,
    model_args: options.ModelArgs = "{}",
    weights: options.Weights = None,
    data_dir: options.DataDir = Path("data"),
    split: options.Split = None,
    skip: options.Skip = 0,
    limit: options.Limit = None,
    normalize: options.Normalize = "none",
    loss: options.Loss = "cross_entropy",
    measures: options.Measures = None,
    columns: options.Columns = "exact",
    layers: options.Layers = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64; the model's own if not given.")] = None,
    device: options.Device = "cpu",
    memory: options.Memory = "1GiB",
    seed: options.Seed = 0,
    logits: options.Logits = "none",
    diagonal: options.Diagonal = "exact",
    initial: options.Initial = None,
    certificate: Annotated[bool, typer.Option(help="Check whether the curvature is the Hessian's own.")] = True,
    quiet: options.Quiet = False,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report into this file, .png, .svg or .pdf.")] = None,
    html: options.Html = None,
    show_traceback: options.Traceback = False,
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
