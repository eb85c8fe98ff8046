"""Options that several commands share: the model and the data that a command is about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from saltflat.cli.program import DTYPES
from saltflat.datasets import read_data
from saltflat.datasets.checkpoints import is_folded, load_weights, match_weights, put_weights
from saltflat.datasets.user_code import build_from_spec, wrap_model_errors
from saltflat.errors import ModelError, OptionError
from saltflat.symmetry.fold import fold
from saltflat.symmetry.tracing.run import take_example
from saltflat.validation import check_seed, parse_device

Model: TypeAlias = Annotated[
    str, typer.Option(help="package.module:function that makes the model; modules in this folder are found.")
]
Data: TypeAlias = Annotated[
    str,
    typer.Option(
        help="digits, mnist, fashion-mnist, cifar10, cifar100; a file .npz or .safetensors with inputs (or x) and "
        "targets (or y); or package.module:function that makes the data."
    ),
]
ModelArgs: TypeAlias = Annotated[str, typer.Option(help="Arguments of that function, as a JSON object.")]
Weights: TypeAlias = Annotated[
    Path | None, typer.Option(help="Trained weights: .safetensors, or a state_dict saved by torch.")
]
DataDir: TypeAlias = Annotated[
    Path, typer.Option(envvar="SALTFLAT_DATA", help="Where named data sets are, as torchvision lays them out.")
]
Split: TypeAlias = Annotated[str | None, typer.Option(help="train (if not given) or test, of a named data set.")]
Skip: TypeAlias = Annotated[int, typer.Option(help="Leave out so many examples at the beginning.")]
Limit: TypeAlias = Annotated[int | None, typer.Option(help="Take at most so many examples.")]
Normalize: TypeAlias = Annotated[
    str, typer.Option(help="Inputs of a named data set: none ([0, 1]), half ([-1, 1]) or standard.")
]
Loss: TypeAlias = Annotated[str, typer.Option(help="cross_entropy, mse or bce_with_logits.")]
Measures: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Names, with commas or one by one; quick (if not given: what one sweep over the data gives), invariant "
        "(what rescaling leaves unchanged) or all."
    ),
]
Columns: TypeAlias = Annotated[str, typer.Option(help="exact, top (top:5) or sampled (sampled:16).")]
Layers: TypeAlias = Annotated[list[str] | None, typer.Option(help="Names of modules or parameters; all if not given.")]
Device: TypeAlias = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto for a GPU if there is one.")]
Memory: TypeAlias = Annotated[str, typer.Option(help="Working memory beyond the model and the results.")]
Seed: TypeAlias = Annotated[
    int, typer.Option(help="Of random columns, and of weights that the model's function draws.")
]
Logits: TypeAlias = Annotated[
    str, typer.Option(help="none; std or l2 to bring each example's outputs to one scale first.")
]
Diagonal: TypeAlias = Annotated[
    str, typer.Option(help="exact, finite_difference, finite_difference_printed or hutchinson.")
]
Initial: TypeAlias = Annotated[Path | None, typer.Option(help="Weights before training, for distances from them.")]
Html: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write it to this file as one page for a browser, which loads nothing.")
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Traceback: TypeAlias = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]


@dataclass(frozen=True)
class ModelDataSource:
    """Where model and data come from, as the options say it."""

    model: str
    model_args: str
    weights: Path | None
    data: str
    data_dir: Path
    split: str | None
    skip: int
    limit: int | None
    normalize: str
    device: torch.device

    @classmethod
    def from_options(cls, device: str, **options: Any) -> ModelDataSource:
        """The same with a device that is known to be there."""
        return cls(device=parse_device(device), **options)

    def load_network(self, seed: int) -> tuple[nn.Module, list[str]]:
        """The model with its weights, on its device; and what is to be said of the weights."""
        torch.manual_seed(check_seed(seed))
        network = build_from_spec(self.model, "model", self._parse_model_args())
        if not isinstance(network, nn.Module):
            raise ModelError(
                f"Got a {type(network).__name__} from {self.model!r}. Want a torch.nn.Module. Do: return the model."
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
                network = self._fold_network(network)
                notes.append("These are weights without BatchNorm: the model was folded before it was given them.")
            notes += put_weights(network, loaded)
        return network.to(self.device).eval(), notes

    def is_folded(self) -> bool:
        """Whether the weights are of the model without BatchNorm."""
        return self.weights is not None and is_folded(self.weights)

    def _fold_network(self, network: nn.Module) -> nn.Module:
        network = network.to(self.device)
        with self.wrap_errors():
            return fold(network, take_example(self.load_examples(network)))

    def load_examples(self, network: nn.Module, dtype: torch.dtype | None = None) -> Any:
        """The data, where the model is; in its precision if no other is given."""
        own = next((p.dtype for p in network.parameters() if p.dtype in DTYPES.values()), torch.float32)
        found = read_data(self.data, self.data_dir, self.split, self.skip, self.limit, self.normalize)
        return move_to_device(found, self.device, dtype or own)

    def wrap_errors(self) -> AbstractContextManager[None]:
        """Inside of it our code calls the model and reads the data: errors in these are told as theirs."""
        return wrap_model_errors(self.model, self.data)

    def format_data_note(self) -> str:
        """The data in a sentence."""
        options = {"split": self.split, "skip": self.skip or None, "limit": self.limit, "normalize": self.normalize}
        said = [f"{name} {value}" for name, value in options.items() if value not in (None, "none")]
        return f"Data: {', '.join([self.data, *said])}."

    def _parse_model_args(self) -> dict[str, Any]:
        try:
            given = json.loads(self.model_args)
        except (ValueError, RecursionError) as error:
            given = error
        if not isinstance(given, dict):
            raise OptionError(
                f"Got --model-args {self.model_args[:200]!r}{f' ({given})' if isinstance(given, Exception) else ''}. "
                "Want a JSON object. Do: for instance '{\"width\": 3}', with the quotes."
            )
        return given


def load_initial_weights(network: nn.Module, path: Path | None) -> tuple[dict[str, Tensor] | None, list[str]]:
    """The weights before training, by the network's own names; and what is to be said of them."""
    if path is None:
        return None, []
    loaded = load_weights(path)
    found = match_weights(network, loaded)
    return found, [f"Weights before training: {path}.", *loaded.notes, *found.notes]


def move_to_device(data: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors on the device, real numbers in ``dtype``; batches of other data are moved when they are read."""
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        return tuple(part.to(device, dtype if part.is_floating_point() else part.dtype) for part in data)
    return data if device.type == "cpu" else DeviceBatches(data, device)


@dataclass(frozen=True)
class DeviceBatches:
    """Data whose batches come out on a device; as often as the data can be read."""

    data: Any
    device: torch.device

    def __iter__(self) -> Iterator[Any]:
        data = self.data
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            data = DataLoader(data, batch_size=128)
        for batch in data:
            yield tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, batch)
