"""Rescale a network: saltflat audit and symmetries."""

from __future__ import annotations

from typing import Annotated

import typer

import saltflat
from saltflat.cli.inputs import LossOptions, MeasureOptions, NetworkOptions, PageOptions, Plot, compute_result
from saltflat.cli.program import add_command, app, check_outputs, parse_names, print_result, reword_audit, write_figure
from saltflat.cli.torchrun import is_first, make_group_arguments, open_process_group


@add_command(app)
def audit(
    source: NetworkOptions,
    sweep: LossOptions,
    chosen: MeasureOptions,
    output: PageOptions,
    draws: Annotated[int, typer.Option(help="Number of random rescalings of each kind.")] = 20,
    spread: Annotated[
        float, typer.Option(help="Standard deviation of the logarithms of the factors: 2 gives e^-4 to e^4.")
    ] = 2.0,
    kinds: Annotated[
        list[str] | None,
        typer.Option(help="layer (one factor per parameter), unit (one factor per unit). Default: both."),
    ] = None,
) -> None:
    """Rescale a network at random without changing its function, and test which measures change.

    For each measure: whether it changes, by how much, and whether that agrees with what it claims. The network is
    measured in float64, 1 + 2 * draws times in all. The exit code is 1 if a measure changed that claims to be
    invariant, 2 for bad input, else 0.
    """
    from saltflat.audit.audit import KINDS

    options = {"draws": draws, "spread": spread, "kinds": parse_names(kinds) or tuple(KINDS)}
    with open_process_group() as group:
        shared = make_group_arguments(group)
        found = compute_result(saltflat.audit_invariance, source, sweep, output, chosen, **options, **shared)
        if is_first(group):
            output.write(reword_audit(found))
    if not found.holds:
        raise typer.Exit(1)


@add_command(app)
def symmetries(
    source: NetworkOptions,
    kind: Annotated[str, typer.Option(help="unit (one factor per unit) or layer (one factor per parameter).")] = "unit",
    plot: Plot = None,
) -> None:
    """Find the rescalings of a network that leave its function unchanged.

    The model runs once, on the first examples of the data. The command prints which weights can be rescaled, and which
    operations fix the others.
    """
    from saltflat.symmetry.equality import take_example
    from saltflat.symmetry.group import check_rescaling_kind

    check_rescaling_kind(kind)
    check_outputs(None, plot, quiet=False)
    with source.open() as loaded:
        group = saltflat.find_symmetries(loaded.network, take_example(loaded.examples))
    group = group.restrict_to_layers() if kind == "layer" else group
    print_result(group)
    if plot is not None:
        write_figure(group.plot(), plot)
