"""Write other weights for the same function: saltflat fold and rebalance."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.text import Text

import saltflat
from saltflat.cli.inputs import Columns, NetworkOptions, Quiet, SweepOptions
from saltflat.cli.program import add_command, app, choose_verb, print_message, print_result
from saltflat.errors import ModelError, OptionError

if TYPE_CHECKING:
    from torch import nn

    from saltflat.engine.data import Data

NUM_COMPARED = 8  # examples on which the outputs of both networks are compared


@dataclass(frozen=True, kw_only=True)
class WeightsOutputOptions:
    """Where new weights go."""

    heading: ClassVar[str] = "Output"

    out: Annotated[Path, typer.Option(help="Write the new weights to this file, .safetensors.")]
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False
    quiet: Quiet = False

    def check(self, weights: Path | None) -> None:
        """Check before the work starts that its result can be written, and that no file is lost."""
        from saltflat.results.files import check_writable_path

        if self.out.suffix != ".safetensors":
            raise OptionError(
                f"Expected a name that ends in .safetensors, but got --out {str(self.out)!r}. Try new.safetensors."
            )
        place = check_writable_path(self.out, "--out")
        if weights is not None and place == weights.resolve():
            raise OptionError(
                f"Expected two different files, but got {str(self.out)!r} for both --out and --weights. Try another "
                "name for --out."
            )
        if place.exists() and not self.overwrite:
            raise OptionError(
                f"Expected a new file, but got --out {str(self.out)!r}, which exists. Try another name, or add "
                "--overwrite."
            )

    def write(self, new: nn.Module, difference: float, lines: list[str], folded: bool) -> None:
        """Write the weights of the new network, and print the lines."""
        from saltflat.datasets.checkpoints import save_weights
        from saltflat.results.text import make_printable

        done = choose_verb(self.out)
        count = save_weights(new, self.out, folded)
        if self.quiet:
            return
        compared = f"on the first examples (at most {NUM_COMPARED})"
        lines = [*lines, f"Outputs differ by {difference:.1e} of their largest, {compared}."]
        print_result(Text("\n".join(map(make_printable, lines))))
        print_message(f"{done} {self.out}: {count} tensors.")


@add_command(app)
def fold(source: NetworkOptions, output: WeightsOutputOptions) -> None:
    """Fold BatchNorm into the preceding layers, and write the weights of the network without it.

    The function stays the same: both networks are compared on the first examples of the data before anything is
    written. The other commands fold the model themselves if the new file is passed as --weights.
    """
    from saltflat.layers.normalization import Affine
    from saltflat.symmetry.batch_norm_uses import is_batch_norm
    from saltflat.symmetry.equality import take_example

    output.check(source.weights)
    with source.open() as loaded:
        network = loaded.network
        new = saltflat.fold(network, take_example(loaded.examples))
        difference = _compare_outputs(network, new, loaded.examples)
    norms = {name: new.get_submodule(name) for name, each in network.named_modules() if is_batch_norm(each)}
    if not norms:
        raise ModelError(
            f"Expected a model with BatchNorm, but got a {type(network).__name__} without a BatchNorm that can be "
            "folded. Try using the weights as they are; nothing was written."
        )
    affine = sum(isinstance(each, Affine) for each in norms.values())
    kept = sum(is_batch_norm(each) for each in norms.values())
    lines = [
        *(f"Note: {note}" for note in loaded.notes),
        f"{len(norms)} BatchNorm layer{'s' * (len(norms) > 1)}: {len(norms) - affine - kept} folded into the layer "
        f"before, {affine} became a factor and a shift of their own, {kept} stayed.",
    ]
    output.write(new, difference, lines, folded=True)


@add_command(app)
def rebalance(
    source: NetworkOptions,
    sweep: SweepOptions,
    output: WeightsOutputOptions,
    columns: Columns = "exact",
    kind: Annotated[str, typer.Option(help="unit (one factor per unit) or layer (one factor per parameter).")] = "unit",
) -> None:
    """Rescale a network so that its Hessian has the smallest trace, and write the new weights.

    The function stays the same: both networks are compared on the first examples of the data before anything is
    written. The file fits the same model.
    """
    from saltflat.results.text import format_number
    from saltflat.symmetry.group import check_rescaling_kind

    chosen = check_rescaling_kind(kind)
    output.check(source.weights)
    arguments = {**sweep.make_arguments(), "columns": columns, "seed": source.seed}
    arguments["progress"] = False if output.quiet else None
    with source.open(arguments["dtype"]) as loaded, warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always")
        new = saltflat.rebalance(loaded.network, loaded.examples, sweep.loss, kind=chosen, **arguments)
        difference = _compare_outputs(loaded.network, new, loaded.examples)
        before, after = (_compute_trace(each, loaded.examples, sweep.loss, arguments) for each in (loaded.network, new))
    notes = [*loaded.notes, *(str(each.message) for each in doubts), loaded.data_note]
    share = f" ({format_number(100 * after / before, 3)} %)" if before else ""
    lines = [
        *(f"Note: {note}" for note in notes),
        f"Gauss-Newton trace: {format_number(before)} before, {format_number(after)} now{share}.",
    ]
    output.write(new, difference, lines, folded=source.is_folded())


def _compare_outputs(network: nn.Module, new: nn.Module, examples: Data) -> float:
    """Return how far the outputs differ, in the model's own precision, after checking that it is rounding error."""
    from saltflat.symmetry.equality import COARSE_TOLERANCE, compare_outputs, parse_example, take_example

    difference = compare_outputs(network, new, parse_example(take_example(examples, count=NUM_COMPARED)))
    if not difference <= COARSE_TOLERANCE:
        raise ModelError(
            "Expected the same outputs up to rounding, but got outputs of the new network that differ by "
            f"{difference:.1e} of their largest. Try a model in float64; nothing was written."
        )
    return difference


def _compute_trace(network: nn.Module, examples: Data, loss: str, arguments: dict[str, Any]) -> float:
    name = "curvature_trace"
    found = saltflat.compute_statistics(network, examples, names=name, loss=loss, **arguments)[name]
    return sum(float(each) for each in found.values())
