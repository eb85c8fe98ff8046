"""saltflat landscape and spectrum: the loss around the weights, and its curvature"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

import saltflat
from saltflat.cli import inputs
from saltflat.cli.inputs import ModelDataSource
from saltflat.cli.program import (
    app,
    check_outputs,
    open_cli_session,
    parse_dtype,
    parse_names,
    print_result,
    write_result,
)


@app.command()
def landscape(
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
    directions: Annotated[
        str, typer.Option(help="filter (random, each filter as long as that of the weights), random or eigenvectors.")
    ] = "filter",
    dimensions: Annotated[int, typer.Option(help="1 for a curve, 2 for a map.")] = 1,
    points: Annotated[int, typer.Option(help="Along each direction, an odd number.")] = 21,
    radius: Annotated[float, typer.Option(help="How far the outermost points are, in lengths of the direction.")] = 1.0,
    normalize_directions: Annotated[
        str | None, typer.Option(help="filter, layer, entry, length or none; the directions' usual one if not given.")
    ] = None,
    biases: Annotated[str, typer.Option(help="ignore or include biases and norms in random directions.")] = "ignore",
    batch_norm: Annotated[
        str, typer.Option(help="running: the statistics that the model keeps; recompute: taken anew at every point.")
    ] = "running",
    layers: inputs.Layers = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64; the model's own if not given.")] = None,
    device: inputs.Device = "cpu",
    memory: inputs.Memory = "1GiB",
    seed: Annotated[
        int, typer.Option(help="Of the random directions, and of weights that the model's function draws.")
    ] = 0,
    quiet: inputs.Quiet = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the landscape to this file, as JSON; show prints it again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the landscape into this file, .png, .svg or .pdf.")] = None,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Walk away from a network's weights along one or two directions, and see how the loss rises."""
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
            found = saltflat.compute_landscape(
                network,
                examples,
                loss,
                directions=directions,
                dimensions=dimensions,
                points=points,
                radius=radius,
                normalize=normalize_directions,
                biases=biases,
                batch_norm=batch_norm,
                layers=parse_names(layers),
                memory=memory,
                dtype=precision,
                seed=seed,
                progress=False if quiet else None,
            )
    found = dataclasses.replace(found, notes=(*notes, *found.notes, source.format_data_note()))
    if not quiet:
        print_result(found)
    write_result(found, out, plot, quiet)


@app.command()
def spectrum(
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
    layers: inputs.Layers = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64; the model's own if not given.")] = None,
    device: inputs.Device = "cpu",
    memory: inputs.Memory = "1GiB",
    seed: Annotated[
        int, typer.Option(help="Of the random vectors, and of weights that the model's function draws.")
    ] = 0,
    quiet: inputs.Quiet = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the spectrum to this file, as JSON; show prints it again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the spectrum into this file, .png, .svg or .pdf.")] = None,
    show_traceback: inputs.Traceback = False,
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
