"""saltflat fold and rebalance: other weights for the same function"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.text import Text
from torch import nn

from saltflat.cli import inputs
from saltflat.cli.inputs import ModelDataSource
from saltflat.cli.program import app, open_cli_session, parse_dtype, print_message, print_result
from saltflat.datasets.checkpoints import save_weights
from saltflat.errors import ModelError, OptionError
from saltflat.layers.normalization import Affine
from saltflat.results.files import check_writable_path
from saltflat.results.text import format_number, make_printable
from saltflat.statistics.compute import compute_statistics
from saltflat.symmetry.batch_norm_uses import is_batch_norm
from saltflat.symmetry.equality import COARSE, compare_outputs
from saltflat.symmetry.fold import fold as folded_model
from saltflat.symmetry.group import check_rescaling_kind
from saltflat.symmetry.minimize import rebalance as rebalanced_model
from saltflat.symmetry.tracing.run import parse_example, take_example

COMPARED = 8  # examples

Out: TypeAlias = Annotated[Path, typer.Option(help="Write the new weights to this file, .safetensors.")]
Overwrite: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace the file if there is one.")]


@app.command(
    help="Fold BatchNorm into the layers before it and write the weights of the network without it.\n\n"
    "The function stays the same: both networks are compared on the first examples of the data before anything is "
    "written. The other commands fold the model themselves when they are given the new file as --weights."
)
def fold(
    model: inputs.Model,
    data: inputs.Data,
    out: Out,
    model_args: inputs.ModelArgs = "{}",
    weights: inputs.Weights = None,
    data_dir: inputs.DataDir = Path("data"),
    split: inputs.Split = None,
    normalize: inputs.Normalize = "none",
    device: inputs.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Of weights that the model's function draws.")] = 0,
    overwrite: Overwrite = False,
    quiet: inputs.Quiet = False,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Fold BatchNorm into the layers before it and write the weights of the network without it."""
    _check_weights_path(out, weights, overwrite)
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
        network, notes = source.load_network(seed)
        examples = source.load_examples(network)
        with source.wrap_errors():
            new = folded_model(network, take_example(examples))
            off = _compare_outputs(network, new, examples)
    norms = {name: new.get_submodule(name) for name, each in network.named_modules() if is_batch_norm(each)}
    if not norms:
        raise ModelError(
            f"Expected one that has some, but got a {type(network).__name__} without a BatchNorm that can be folded. "
            "Try going on with the weights as they are; nothing was written."
        )
    affine = sum(isinstance(each, Affine) for each in norms.values())
    kept = sum(is_batch_norm(each) for each in norms.values())
    lines = [
        *(f"Note: {note}" for note in notes),
        f"{len(norms)} BatchNorm layer{'s' * (len(norms) > 1)}: {len(norms) - affine - kept} folded into the layer "
        f"before, {affine} became a factor and a shift of their own, {kept} stayed.",
    ]
    _write_new_weights(new, out, off, lines, quiet, folded=True)


@app.command(
    help="Rescale a network so that its Hessian has the smallest trace, and write the new weights.\n\n"
    "The function stays the same: both networks are compared on the first examples of the data before anything is "
    "written. The file fits the same model."
)
def rebalance(
    model: inputs.Model,
    data: inputs.Data,
    out: Out,
    model_args: inputs.ModelArgs = "{}",
    weights: inputs.Weights = None,
    data_dir: inputs.DataDir = Path("data"),
    split: inputs.Split = None,
    skip: inputs.Skip = 0,
    limit: inputs.Limit = None,
    normalize: inputs.Normalize = "none",
    loss: inputs.Loss = "cross_entropy",
    kind: Annotated[
        str, typer.Option(help="unit for a size of each unit, layer for one factor of each whole parameter.")
    ] = "unit",
    columns: inputs.Columns = "exact",
    dtype: Annotated[
        str | None, typer.Option(help="Precision to measure in, float32 or float64; the model's own if not given.")
    ] = None,
    device: inputs.Device = "cpu",
    memory: inputs.Memory = "1GiB",
    seed: inputs.Seed = 0,
    overwrite: Overwrite = False,
    quiet: inputs.Quiet = False,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Rescale a network so that its Hessian has the smallest trace, and write the new weights."""
    check_rescaling_kind(kind)
    _check_weights_path(out, weights, overwrite)
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
    shown: dict[str, Any] = {"columns": columns, "memory": memory, "dtype": precision, "seed": seed}
    shown["progress"] = False if quiet else None
    with open_cli_session(show_traceback):
        network, notes = source.load_network(seed)
        examples = source.load_examples(network, precision)
        with source.wrap_errors(), warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always")
            new = rebalanced_model(network, examples, loss, kind, **shown)
            off = _compare_outputs(network, new, examples)
            before, after = (_compute_trace(each, examples, loss, shown) for each in (network, new))
    lines = [f"Note: {note}" for note in [*notes, *(str(each.message) for each in doubts), source.format_data_note()]]
    share = f" ({format_number(100 * after / before, 3)} %)" if before else ""
    lines.append(f"Gauss-Newton trace: {format_number(before)} before, {format_number(after)} now{share}.")
    _write_new_weights(new, out, off, lines, quiet, folded=source.is_folded())


def _check_weights_path(out: Path, weights: Path | None, overwrite: bool) -> None:
    """Find out before the work whether its result can be kept, and that nothing is lost by it."""
    if out.suffix != ".safetensors":
        raise OptionError(
            f"Expected a name that ends in .safetensors, but got --out {str(out)!r}. Try new.safetensors."
        )
    place = check_writable_path(out, "--out")
    if weights is not None and place == weights.resolve():
        raise OptionError(
            f"Expected the old weights to stay, but got {str(out)!r} for both --out and --weights. Try choosing "
            "another name."
        )
    if place.exists() and not overwrite:
        raise OptionError(
            f"Expected a new file, but got --out {str(out)!r}, which exists. Try choosing another name, or adding "
            "--overwrite."
        )


def _compare_outputs(network: nn.Module, new: nn.Module, examples: Any) -> float:
    """How far the outputs are apart, in the model's own precision, if that is no more than rounding."""
    off = compare_outputs(network, new, parse_example(take_example(examples, count=COMPARED)))
    if not off <= COARSE:
        raise ModelError(
            f"Expected the same up to rounding, but got outputs of the new network that differ by {off:.1e} of their "
            "largest. Try a model in float64; nothing was written."
        )
    return off


def _compute_trace(network: nn.Module, examples: Any, loss: str, shown: dict[str, Any]) -> float:
    found = compute_statistics(network, examples, "curvature_trace", loss, **shown)["curvature_trace"]
    return sum(float(each) for each in found.values())


def _write_new_weights(new: nn.Module, out: Path, off: float, lines: list[str], quiet: bool, folded: bool) -> None:
    done = "Replaced" if out.exists() else "Wrote"
    count = save_weights(new, out, folded)
    if quiet:
        return
    lines.append(f"Outputs differ by {off:.1e} of their largest, on the first examples (at most {COMPARED}).")
    print_result(Text("\n".join(map(make_printable, lines))))
    print_message(f"{done} {out}: {count} tensors.")
