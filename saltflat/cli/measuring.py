"""saltflat measure"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.cli import options
from saltflat.cli.names import dtype_named, names_from
from saltflat.cli.outputs import check_outputs, keep, keep_page
from saltflat.cli.program import app, users_session
from saltflat.cli.screen import show_on_screen
from saltflat.cli.source import Source, weights_before
from saltflat.cli.wording import report_worded


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
    source = Source.of(
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
    precision = dtype_named(dtype)
    with users_session(show_traceback):
        network, notes = source.network(seed)
        examples = source.examples(network, precision)
        before, more = weights_before(network, initial)
        with source.running():
            report = saltflat.measure(
                network,
                examples,
                loss,
                names_from(measures),
                columns=columns,
                layers=names_from(layers),
                memory=memory,
                dtype=precision,
                seed=seed,
                progress=False if quiet else None,
                logits=logits,
                diagonal=diagonal,
                initial=before,
                certificate=certificate,
            )
    report = dataclasses.replace(report_worded(report), notes=(*notes, *more, *report.notes, source.told()))
    if not quiet:
        show_on_screen(report)
    keep(report, out, plot, quiet)
    keep_page(report, html, quiet)
