"""saltflat spectrum"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.cli import options
from saltflat.cli.names import parse_dtype, parse_names
from saltflat.cli.outputs import check_outputs, write_result
from saltflat.cli.program import app, open_cli_session
from saltflat.cli.screen import print_result
from saltflat.cli.source import ModelDataSource


@app.command()
def spectrum(
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
    k: Annotated[int, typer.Option("--k", help="How many of the largest eigenvalues.")] = 10,
    smallest: Annotated[
        int | None,
        typer.Option(help="How many of the smallest; 5 for the Hessian of the network and 0 otherwise if not given."),
    ] = None,
    matrix: Annotated[str, typer.Option(help="hessian or gauss_newton.")] = "hessian",
    per: Annotated[str, typer.Option(help="network, or layer for the block of each parameter.")] = "network",
    density: Annotated[bool, typer.Option(help="Estimate the density of all eigenvalues and the trace.")] = True,
    draws: Annotated[int, typer.Option(help="Random probes for the density.")] = 8,
    steps: Annotated[int, typer.Option(help="Lanczos steps of each probe.")] = 50,
    layers: options.Layers = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64; the model's own if not given.")] = None,
    device: options.Device = "cpu",
    memory: options.Memory = "1GiB",
    seed: Annotated[
        int, typer.Option(help="Of the random vectors, and of weights that the model's function draws.")
    ] = 0,
    quiet: options.Quiet = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the spectrum to this file, as JSON; show prints it again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the spectrum into this file, .png, .svg or .pdf.")] = None,
    show_traceback: options.Traceback = False,
) -> None:
    """Find the largest and smallest eigenvalues of the Hessian, and the density of all of them."""
    check_outputs(out, plot, quiet)
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
        with source.wrap_errors():
            found = saltflat.compute_spectrum(
                network,
                examples,
                loss,
                k=k,
                smallest=smallest,
                matrix=matrix,
                per=per,
                density=density,
                draws=draws,
                steps=steps,
                layers=parse_names(layers),
                memory=memory,
                dtype=precision,
                seed=seed,
                progress=False if quiet else None,
            )
    found = dataclasses.replace(found, notes=(*found.notes, *notes, source.format_data_note()))
    if not quiet:
        print_result(found)
    write_result(found, out, plot, quiet)
