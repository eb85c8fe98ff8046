"""Options that commands share, and the model and the data that they name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

import typer

from saltflat.cli.program import (
    check_outputs,
    open_cli_session,
    parse_names,
    print_result,
    write_figure,
    write_result,
    write_result_page,
)
from saltflat.errors import ModelError, OptionError, make_unknown_name_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from saltflat.audit.result import Audit
    from saltflat.bounds.bound import Bound
    from saltflat.engine.data import Data
    from saltflat.landscape.result import Landscape
    from saltflat.results.plan import MeasurementPlan
    from saltflat.results.report import Report
    from saltflat.spectrum.result import Spectrum

Result = TypeVar("Result", "Report", "Audit", "Landscape", "Spectrum", "Bound", "MeasurementPlan")

Columns: TypeAlias = Annotated[str, typer.Option(help="exact, top (top:5) or sampled (sampled:16).")]
Layers: TypeAlias = Annotated[list[str] | None, typer.Option(help="Names of modules or parameters. Default: all.")]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="Draw the result into this file: .png, .svg or .pdf.")]
Html: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write the result to this file as a self-contained page for a browser.")
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Traceback: TypeAlias = Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")]

DTYPES = ("float32", "float64")


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of this name, or None for None."""
    import torch

    if name is not None and name not in DTYPES:
        raise make_unknown_name_error("dtype", name, DTYPES)
    return None if name is None else {"float32": torch.float32, "float64": torch.float64}[name]


@dataclass(frozen=True)
class LoadedNetwork:
    """A network and its data, ready to be measured.

    Attributes:
        network: with its weights, on its device, in evaluation mode.
        examples: the data, on the same device.
        notes: about the weights.
        data_note: about the data.
    """

    network: nn.Module
    examples: Data
    notes: list[str]
    data_note: str

    def add_notes(self, result: Result, *more: str) -> Result:
        """Return the result with notes about the weights before its own, and about the data after them."""
        return dataclasses.replace(result, notes=(*self.notes, *more, *result.notes, self.data_note))


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network and the data that a command works on."""

    heading: ClassVar[str] = "Network and data"

    model: Annotated[
        str,
        typer.Option(help="package.module:function that builds the model. Modules in the current folder are found."),
    ]
    data: Annotated[
        str,
        typer.Option(
            help="digits, mnist, fashion-mnist, cifar10 or cifar100; a .npz or .safetensors file with inputs (or x) "
            "and targets (or y); or package.module:function that builds the data."
        ),
    ]
    model_args: Annotated[str, typer.Option(help="Arguments of the model's function, as a JSON object.")] = "{}"
    weights: Annotated[
        Path | None, typer.Option(help="Trained weights: .safetensors, or a state_dict saved by torch.")
    ] = None
    data_dir: Annotated[
        Path, typer.Option(envvar="SALTFLAT_DATA", help="Folder of the named data sets, laid out as by torchvision.")
    ] = Path("data")
    split: Annotated[str | None, typer.Option(help="Split of a named data set, train or test. Default: train.")] = None
    skip: Annotated[int, typer.Option(help="Number of examples to skip at the beginning.")] = 0
    limit: Annotated[int | None, typer.Option(help="Maximum number of examples. Default: all.")] = None
    normalize: Annotated[
        str, typer.Option(help="Inputs of a named data set: none ([0, 1]), half ([-1, 1]) or standard.")
    ] = "none"
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto for a GPU if there is one.")] = "cpu"
    seed: Annotated[
        int, typer.Option(help="Seed of random numbers, including weights that the model's function initializes.")
    ] = 0
    show_traceback: Traceback = False

    @contextmanager
    def open(self, dtype: torch.dtype | None = None) -> Iterator[LoadedNetwork]:
        """Load the network and the data. Inside of the context, errors in the user's code are reported as such.

        Args:
            dtype: of the data; that of the network by default.
        """
        from saltflat.datasets.user_code import wrap_model_errors
        from saltflat.validation import parse_device

        device = parse_device(self.device)
        with open_cli_session(self.show_traceback):
            network, notes = self._load_network(device)
            examples = self._load_examples(network, device, dtype)
            with wrap_model_errors(self.model, self.data):
                yield LoadedNetwork(network, examples, notes, self._format_data_note())

    def is_folded(self) -> bool:
        """Return whether the weights are those of the model without BatchNorm."""
        from saltflat.datasets.checkpoints import is_folded

        return self.weights is not None and is_folded(self.weights)

    def _load_network(self, device: torch.device) -> tuple[nn.Module, list[str]]:
        """Return the model with its weights on its device, and notes about the weights."""
        import torch

        from saltflat.datasets.checkpoints import load_weights, put_weights
        from saltflat.datasets.user_code import build_from_spec
        from saltflat.validation import check_seed

        torch.manual_seed(check_seed(self.seed))
        network = build_from_spec(self.model, "model", self._parse_model_args())
        if not isinstance(network, torch.nn.Module):
            raise ModelError(
                f"Expected a torch.nn.Module from {self.model!r}, but got a {type(network).__name__}. Try returning "
                "the model."
            )
        if self.weights is None:
            notes = [
                f"No weights were given (--weights): these are the random initial weights of {self.model}, unless it "
                "loads trained ones itself."
            ]
        else:
            loaded = load_weights(self.weights)
            notes = [f"Weights: {self.weights}.", *loaded.notes]
            if loaded.folded:
                network = self._fold_network(network, device)
                notes.append("These are weights without BatchNorm: the model was folded before they were loaded.")
            notes += put_weights(network, loaded)
        return network.to(device).eval(), notes

    def _fold_network(self, network: nn.Module, device: torch.device) -> nn.Module:
        from saltflat.datasets.user_code import wrap_model_errors
        from saltflat.symmetry.equality import take_example
        from saltflat.symmetry.fold import fold

        network = network.to(device)
        with wrap_model_errors(self.model, self.data):
            return fold(network, take_example(self._load_examples(network, device)))

    def _load_examples(self, network: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> Data:
        """Return the data on the device, in the precision of the network by default."""
        import torch

        from saltflat.datasets import read_data

        precisions = [each.dtype for each in network.parameters() if each.dtype in (torch.float32, torch.float64)]
        found: Data = read_data(self.data, self.data_dir, self.split, self.skip, self.limit, self.normalize)
        return move_data(found, device, dtype or next(iter(precisions), torch.float32))

    def _format_data_note(self) -> str:
        options = {"split": self.split, "skip": self.skip or None, "limit": self.limit, "normalize": self.normalize}
        said = [f"{name} {value}" for name, value in options.items() if value not in (None, "none")]
        return f"Data: {', '.join([self.data, *said])}."

    def _parse_model_args(self) -> dict[str, Any]:
        try:
            found, problem = json.loads(self.model_args), ""
        except (ValueError, RecursionError) as error:
            found, problem = None, f" ({error})"
        if not isinstance(found, dict):
            raise OptionError(
                f"Expected a JSON object, but got --model-args {self.model_args[:200]!r}{problem}. "
                "Try for instance '{\"width\": 3}', with the quotes."
            )
        return found


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How the loss is averaged over the data."""

    heading: ClassVar[str] = "Computation"

    loss: Annotated[str, typer.Option(help="cross_entropy, mse, bce_with_logits, or model for the model's own.")] = (
        "cross_entropy"
    )
    memory: Annotated[str, typer.Option(help="Working memory beyond the model and the results.")] = "1GiB"

    def make_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for functions of the library."""
        return {"memory": self.memory}


@dataclass(frozen=True, kw_only=True)
class SweepOptions(LossOptions):
    """How the loss is averaged over the data, and in which precision."""

    dtype: Annotated[
        str | None, typer.Option(help="Precision to compute in, float32 or float64. Default: that of the model.")
    ] = None

    def make_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for functions of the library."""
        return {**super().make_arguments(), "dtype": parse_dtype(self.dtype)}


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Which measures are computed, and how."""

    heading: ClassVar[str] = "Computation"

    measures: Annotated[
        list[str] | None,
        typer.Option(
            help="Names, separated by commas or given one by one; quick (one sweep over the data), invariant "
            "(unchanged by rescaling layers) or all. Default: quick."
        ),
    ] = None
    columns: Columns = "exact"
    layers: Layers = None
    logits: Annotated[str, typer.Option(help="Normalization of each example's outputs: none, std or l2.")] = "none"
    diagonal: Annotated[
        str, typer.Option(help="exact, finite_difference, finite_difference_printed, gaussian or hutchinson.")
    ] = "exact"
    initial: Annotated[
        Path | None, typer.Option(help="Weights before training, for distances from the initialization.")
    ] = None

    def make_arguments(self, network: nn.Module) -> tuple[list[list[str] | None], dict[str, Any], list[str]]:
        """Return arguments and keyword arguments for ``saltflat.measure``, and notes about the initial weights."""
        initial, notes = load_initial_weights(network, self.initial)
        options: dict[str, Any] = {"columns": self.columns, "logits": self.logits, "diagonal": self.diagonal}
        return [parse_names(self.measures)], {**options, "layers": parse_names(self.layers), "initial": initial}, notes


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Where a result goes that cannot be drawn."""

    heading: ClassVar[str] = "Output"

    quiet: Quiet = False
    out: Annotated[
        Path | None, typer.Option(help="Write the result to this file, as JSON; saltflat show prints it.")
    ] = None

    def check(self) -> None:
        """Check before the work starts that its results can be written."""
        check_outputs(self.out, None, self.quiet)

    def write(self, result: MeasurementPlan) -> None:
        """Print and write the result."""
        if not self.quiet:
            print_result(result)
        write_result(result, self.out, self.quiet)


@dataclass(frozen=True, kw_only=True)
class OutputOptions(FileOptions):
    """Where a result goes."""

    plot: Plot = None

    @property
    def progress(self) -> bool | None:
        """Whether to show progress: False, or None to show it on a terminal."""
        return False if self.quiet else None

    def check(self) -> None:
        """Check before the work starts that its results can be written."""
        check_outputs(self.out, self.plot, self.quiet)

    def write(self, result: Report | Audit | Landscape | Spectrum | Bound) -> None:  # type: ignore[override]
        """Print, write and draw the result."""
        if not self.quiet:
            print_result(result)
        write_result(result, self.out, self.quiet)
        if self.plot is not None:
            write_figure(result.plot(), self.plot, self.quiet)


@dataclass(frozen=True, kw_only=True)
class PageOptions(OutputOptions):
    """Where a result goes that can be written as a page."""

    html: Html = None

    def check(self) -> None:
        """Check before the work starts that its results can be written."""
        check_outputs(self.out, self.plot, self.quiet, self.html)

    def write(self, result: Report | Audit | Bound) -> None:  # type: ignore[override]
        """Print, write and draw the result, and write its page."""
        super().write(result)
        write_result_page(result, self.html, self.quiet)


def compute_result(
    function: Callable[..., Result],
    source: NetworkOptions,
    sweep: LossOptions,
    output: FileOptions,
    chosen: MeasureOptions | None = None,
    **options: Any,
) -> Result:
    """Return the result of a function of the library for a network and data, with notes about them.

    Args:
        function: of a model, data, a loss and, where measures are chosen, their names.
        source: the network and the data.
        sweep: how the loss is averaged.
        output: where the result will go, which is checked first.
        chosen: the measures, for a function that takes some.
        options: keyword arguments for the function.
    """
    output.check()
    arguments = {**sweep.make_arguments(), "seed": source.seed, **options}
    if isinstance(output, OutputOptions):
        arguments["progress"] = output.progress
    with source.open(arguments.get("dtype")) as loaded:
        names, more, notes = chosen.make_arguments(loaded.network) if chosen is not None else ([], {}, [])
        found = function(loaded.network, loaded.examples, sweep.loss, *names, **arguments, **more)
    return loaded.add_notes(found, *notes)


def load_initial_weights(network: nn.Module, path: Path | None) -> tuple[dict[str, Tensor] | None, list[str]]:
    """Return the weights before training, by the network's own names, and notes about them."""
    from saltflat.datasets.checkpoints import load_weights, match_weights

    if path is None:
        return None, []
    loaded = load_weights(path)
    found = match_weights(network, loaded)
    return found, [f"Weights before training: {path}.", *loaded.notes, *found.notes]


def move_data(data: Data, device: torch.device, dtype: torch.dtype) -> Data:
    """Return data on the device, tensors of real numbers in ``dtype``. Batches are moved when they are read."""
    import torch

    from saltflat.engine.read_data import move_to_device

    if isinstance(data, tuple) and all(isinstance(part, torch.Tensor) for part in data):
        return tuple(part.to(device, dtype if part.is_floating_point() else part.dtype) for part in data)
    return data if device.type == "cpu" else move_to_device(data, device)
