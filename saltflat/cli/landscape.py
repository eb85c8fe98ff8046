"""saltflat landscape"""

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
def landscape(
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
    layers: options.Layers = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64; the model's own if not given.")] = None,
    device: options.Device = "cpu",
    memory: options.Memory = "1GiB",
    seed: Annotated[
        int, typer.Option(help="Of the random directions, and of weights that the model's function draws.")
    ] = 0,
    quiet: options.Quiet = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the landscape to this file, as JSON; show prints it again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the landscape into this file, .png, .svg or .pdf.")] = None,
    show_traceback: options.Traceback = False,
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
