"""Compute the loss around the weights and its curvature: saltflat landscape and spectrum."""

from __future__ import annotations

from typing import Annotated

import typer

import saltflat
from saltflat.cli.inputs import Layers, NetworkOptions, OutputOptions, SweepOptions, compute_result
from saltflat.cli.program import add_command, app, parse_names


@add_command(app)
def landscape(
    source: NetworkOptions,
    sweep: SweepOptions,
    output: OutputOptions,
    layers: Layers = None,
    directions: Annotated[
        str,
        typer.Option(help="filter (random, each filter scaled to the norm of the weights'), random or eigenvectors."),
    ] = "filter",
    dimensions: Annotated[int, typer.Option(help="1 for a curve, 2 for a surface.")] = 1,
    points: Annotated[int, typer.Option(help="Number of points along each direction, odd.")] = 21,
    radius: Annotated[float, typer.Option(help="Distance of the outermost points, in lengths of the direction.")] = 1.0,
    normalize_directions: Annotated[
        str | None, typer.Option(help="filter, layer, entry, length or none. Default: depends on --directions.")
    ] = None,
    biases: Annotated[
        str, typer.Option(help="ignore or include biases and normalization layers in random directions.")
    ] = "ignore",
    batch_norm: Annotated[
        str, typer.Option(help="running: use the model's running statistics; recompute: at every point.")
    ] = "running",
) -> None:
    """Evaluate the loss along one or two directions from the weights."""
    found = compute_result(
        saltflat.compute_landscape,
        source,
        sweep,
        output,
        directions=directions,
        dimensions=dimensions,
        points=points,
        radius=radius,
        normalize=normalize_directions,
        biases=biases,
        batch_norm=batch_norm,
        layers=parse_names(layers),
    )
    output.write(found)


@add_command(app)
def spectrum(
    source: NetworkOptions,
    sweep: SweepOptions,
    output: OutputOptions,
    layers: Layers = None,
    k: Annotated[int, typer.Option("--k", help="Number of largest eigenvalues.")] = 10,
    smallest: Annotated[
        int | None,
        typer.Option(help="Number of smallest eigenvalues. Default: 5 for the Hessian of the network, 0 otherwise."),
    ] = None,
    matrix: Annotated[str, typer.Option(help="hessian or gauss_newton.")] = "hessian",
    per: Annotated[str, typer.Option(help="network, or layer for the block of each parameter.")] = "network",
    density: Annotated[bool, typer.Option(help="Estimate the density of all eigenvalues and the trace.")] = True,
    draws: Annotated[int, typer.Option(help="Number of random probes for the density.")] = 8,
    steps: Annotated[int, typer.Option(help="Number of Lanczos steps per probe.")] = 50,
) -> None:
    """Compute the largest and smallest eigenvalues of the Hessian, and the density of all."""
    found = compute_result(
        saltflat.compute_spectrum,
        source,
        sweep,
        output,
        k=k,
        smallest=smallest,
        matrix=matrix,
        per=per,
        density=density,
        draws=draws,
        steps=steps,
        layers=parse_names(layers),
    )
    output.write(found)
