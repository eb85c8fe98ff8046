"""The model and the data that a command is about."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.cli.names import DTYPES, parse_device
from saltflat.errors import ModelError, OptionError
from saltflat.readers import read_data
from saltflat.readers.factory import build_from_spec
from saltflat.readers.foreign import wrap_model_errors
from saltflat.readers.placed import move_to_device
from saltflat.sweep import check_seed
from saltflat.symmetry.example import take_example
from saltflat.symmetry.fold import fold
from saltflat.weights import is_folded, load_weights, match_weights, put_weights


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
