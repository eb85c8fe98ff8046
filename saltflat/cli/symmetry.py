"""saltflat audit and symmetries: what rescaling a network does"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from saltflat.audit import audit as audit_module
from saltflat.cli import inputs
from saltflat.cli.inputs import ModelDataSource, load_initial_weights
from saltflat.cli.program import (
    app,
    check_outputs,
    open_cli_session,
    parse_names,
    print_result,
    reword_audit,
    write_figure,
    write_result,
    write_result_page,
)
from saltflat.symmetry import find
from saltflat.symmetry.group import check_rescaling_kind
from saltflat.symmetry.tracing.run import take_example


# Given as texts: from docstrings, the lines of all paragraphs but the first would stay broken where they are here.
@app.command(
    help="Rescale a network at random and see which measures notice, though its function stays the same.\n\n"
    "For each measure: whether it stays or moves, by how much, and whether that is what it claims. The network is "
    "measured in float64, 1 + 2 * draws times in all. The exit code is 1 if a measure moved that claims to stay, 2 for "
    "bad input, else 0."
)
def audit(
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
    draws: Annotated[int, typer.Option(help="How many random rescalings of each kind.")] = 20,
    spread: Annotated[
        float, typer.Option(help="Deviation of the logarithms of the factors: 2 gives e^-4 to e^4.")
    ] = 2.0,
    kinds: Annotated[
        list[str] | None,
        typer.Option(help="layer (one factor for a whole parameter), unit (one for each unit), or both if not given."),
    ] = None,
    columns: inputs.Columns = "exact",
    layers: inputs.Layers = None,
    device: inputs.Device = "cpu",
    memory: inputs.Memory = "1GiB",
    seed: Annotated[
        int, typer.Option(help="Of the rescalings, of random columns, and of weights that the model's function draws.")
    ] = 0,
    logits: inputs.Logits = "none",
    diagonal: inputs.Diagonal = "exact",
    initial: inputs.Initial = None,
    quiet: inputs.Quiet = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the audit to this file, as JSON; show prints it again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the audit into this file, .png, .svg or .pdf.")] = None,
    html: inputs.Html = None,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Rescale a network at random and see which measures notice, though its function stays the same."""
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
    with open_cli_session(show_traceback):
        network, notes = source.load_network(seed)
        examples = source.load_examples(network)
        before, more = load_initial_weights(network, initial)
        with source.wrap_errors():
            found = audit_module.audit_invariance(
                network,
                examples,
                loss,
                parse_names(measures),
                draws=draws,
                spread=spread,
                kinds=parse_names(kinds) or tuple(audit_module.KINDS),
                seed=seed,
                columns=columns,
                layers=parse_names(layers),
                memory=memory,
                progress=False if quiet else None,
                logits=logits,
                diagonal=diagonal,
                initial=before,
            )
    found = dataclasses.replace(reword_audit(found), notes=(*notes, *more, *found.notes, source.format_data_note()))
    if not quiet:
        print_result(found)
    write_result(found, out, plot, quiet)
    write_result_page(found, html, quiet)
    if not found.holds:
        raise typer.Exit(1)


@app.command(
    help="Find the rescalings of a network: which weights can grow, if others shrink, so that its function stays the "
    "same.\n\nThe model is run once, on the first examples of the data. Printed is what can be scaled, and which "
    "operations hold the rest fixed."
)
def symmetries(
    model: inputs.Model,
    data: inputs.Data,
    model_args: inputs.ModelArgs = "{}",
    weights: inputs.Weights = None,
    data_dir: inputs.DataDir = Path("data"),
    split: inputs.Split = None,
    normalize: inputs.Normalize = "none",
    kind: Annotated[
        str, typer.Option(help="unit for a factor of each unit, layer for one factor of each whole parameter.")
    ] = "unit",
    device: inputs.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Of weights that the model's function draws.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the network's scales into this file, .png, .svg or .pdf.")
    ] = None,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Find which weights can grow, if others shrink, so that the function stays the same."""
    check_rescaling_kind(kind)
    check_outputs(None, plot, quiet=False)
    source = ModelDataSource.from_options(
        device,
        model=model,
        model_args=model_args,
        weights=weights,
        data=data,
        data_dir=data_dir,
        split=split,
        skip=0,
        limit=None,
        normalize=normalize,
    )
    with open_cli_session(show_traceback):
        network, _ = source.load_network(seed)
        examples = source.load_examples(network)
        with source.wrap_errors():
            group = find.find_symmetries(network, take_example(examples))
    group = group.restrict_to_layers() if kind == "layer" else group
    print_result(group)
    if plot is not None:
        write_figure(group.plot(), plot)
