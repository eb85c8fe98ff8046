"""Certify the error of a network: saltflat certify."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import saltflat
from saltflat.cli.inputs import LoadedNetwork, NetworkOptions, PageOptions, SweepOptions, move_data
from saltflat.cli.program import add_command, app
from saltflat.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

FIRST = "first:"
MOST_DIGITS = 8  # of a number of examples whose positions are listed


@add_command(app)
def certify(
    source: NetworkOptions,
    sweep: SweepOptions,
    output: PageOptions,
    prior: Annotated[
        str,
        typer.Option(
            help="Center of the prior: zero, or a file of weights: from before training, or trained on other examples."
        ),
    ] = "zero",
    prior_data: Annotated[
        str | None,
        typer.Option(
            help="What these weights have seen: none; first:N for the first N examples of --data after --skip, which "
            "the bound leaves out before --limit; or data as for --data (of the training split), whose inputs are "
            "compared with the bound's."
        ),
    ] = None,
    of: Annotated[str, typer.Option("--of", help="The loss in [0, 1]: error or clipped_cross_entropy.")] = "error",
    delta: Annotated[float, typer.Option(help="The probability with which the bound may fail.")] = 0.05,
    epochs: Annotated[int, typer.Option(help="Passes over the data of a gradient descent on the bound.")] = 0,
    move: Annotated[
        bool, typer.Option(help="Let the descent move the center of the posterior away from the weights.")
    ] = False,
    lr: Annotated[float, typer.Option(help="Learning rate of the descent.")] = 1e-3,
    draws: Annotated[int, typer.Option(help="Number of networks drawn for each example.")] = 10,
    precision: Annotated[
        float | None, typer.Option(help="The largest acceptable Monte Carlo margin. Default: no limit.")
    ] = None,
    columns: Annotated[str, typer.Option(help="exact, top (top:5) or sampled (sampled:16).")] = "exact",
) -> None:
    """Certify the error of a network on new data: an upper bound that holds with probability 1 - delta.

    The bound is on networks drawn at random around the weights, with variances from the curvature of the loss. It needs
    a prior that has not seen the data: zero, the weights before training, or weights trained on other examples.
    """
    output.check()
    _check_prior_options(prior, prior_data)
    arguments = sweep.make_arguments()
    counted = prior_data is not None and prior_data.startswith(FIRST)
    # Positions are those in the whole data, of which the limit leaves the first that the prior has not seen.
    with replace(source, limit=None if counted else source.limit).open(arguments.get("dtype")) as loaded:
        center, notes = _load_prior(loaded.network, prior)
        found = saltflat.certify_error(
            loaded.network,
            loaded.examples,
            sweep.loss,
            prior=center,
            prior_data=_parse_prior_data(prior_data, source, loaded),
            delta=delta,
            of=of,  # type: ignore[arg-type]
            epochs=epochs,
            move=move,
            lr=lr,
            draws=draws,
            precision=precision,
            columns=columns,
            limit=source.limit,
            seed=source.seed,
            progress=output.progress,
            **arguments,
        )
    output.write(loaded.add_notes(found, *notes))


def _check_prior_options(prior: str, prior_data: str | None) -> None:
    """Check that it is said what a prior has seen."""
    kind, colon, count = (prior_data or "").partition(":")
    if colon and count.isdecimal() and f"{kind}:" != FIRST:
        raise OptionError(f"Expected --prior-data first:N, but got {prior_data}. Try first:{count}.")
    if f"{kind}:" == FIRST and (not count.isdecimal() or len(count) > MOST_DIGITS or int(count) < 1):
        raise OptionError(f"Expected first:N with a number of examples, but got first:{count[:34]}. Try first:30000.")
    if prior != "zero" and prior_data is None:
        raise OptionError(
            f"Expected --prior-data to say what the prior has seen, but got --prior {prior} alone. Try --prior-data "
            "none for weights from before training, or first:N for weights trained on the first N examples."
        )
    if prior == "zero" and prior_data not in (None, "none"):
        raise OptionError(
            f"Expected no --prior-data for a prior at zero, which has seen nothing, but got {prior_data}. Try --prior "
            "with the file of the weights that were trained on it."
        )


def _load_prior(network: nn.Module, prior: str) -> tuple[Any, list[str]]:
    """Return the center of the prior, and notes about its weights."""
    if prior == "zero":
        return prior, []
    from saltflat.datasets.checkpoints import load_weights, put_weights

    loaded = load_weights(Path(prior))
    center = deepcopy(network)
    return center, [f"Weights of the prior: {prior}.", *loaded.notes, *put_weights(center, loaded)]


def _parse_prior_data(given: str | None, source: NetworkOptions, loaded: LoadedNetwork) -> Any:
    """Return what the prior has seen, as ``certify_error`` takes it."""
    if given is None or given == "none":
        return given
    if given.startswith(FIRST):
        return range(int(given.removeprefix(FIRST)))
    from saltflat.datasets import read_data

    first = next(loaded.network.parameters())
    found = move_data(read_data(given, source.data_dir, normalize=source.normalize), first.device, first.dtype)
    pairs: list[Any] = [each for each in (found, loaded.examples) if _is_pair(each)]
    shapes = [tuple(each[0].shape[1:]) for each in pairs]
    if len(set(shapes)) > 1:
        raise OptionError(
            f"Expected --prior-data with inputs like those of --data, of shape {shapes[1]}, but got {given} with "
            f"{shapes[0]}. Try first:N for the first N examples of --data."
        )
    return found


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple) and bool(data) and hasattr(data[0], "shape")
