"""Where a training stands, on disk, so that it can go on after it was interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from saltflat.report.file import replacing
from saltflat.studies.checksum import checksum
from saltflat.studies.examples import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.trained import Outcome, Trained

FORM = "saltflat.checkpoint/1"
# Rows of the data that are looked at to know them again.
SAMPLE = 512


@dataclass(frozen=True)
class Standing:
    """What a checkpoint holds: plain values, and tensors by name."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def identity(recipes: Sequence[Recipe], examples: Examples, **options: object) -> str:
    """What must be the same for a checkpoint to be of use: recipes, data and how they are trained."""
    plain = [{**_fields(recipe), "architecture": dict(recipe.architecture)} for recipe in recipes]
    data = [
        _known_again(part)
        for part in (examples.train_inputs, examples.train_labels, examples.test_inputs, examples.test_labels)
    ]
    return json.dumps({"form": FORM, "recipes": plain, "data": data, "options": options}, sort_keys=True)


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__ if name != "architecture"}


def _known_again(tensor: Tensor) -> list[Any]:
    rows = tensor[:: max(1, len(tensor) // SAMPLE)].contiguous().cpu()
    return [list(tensor.shape), checksum({"rows": rows})]


def write_checkpoint(path: str | os.PathLike[str], who: str, standing: Standing) -> None:
    """Whoever reads sees the checkpoint before or this one, never half of it."""
    tensors = {name: each.detach().cpu().contiguous() for name, each in standing.tensors.items()}
    # The file sorts names; the order of a state_dict is told beside it.
    facts = {
        "who": who,
        "facts": json.dumps(standing.facts),
        "names": json.dumps(list(tensors)),
        "checksum": checksum(tensors),
    }
    with replacing(path) as part:
        part.write_bytes(save(tensors, metadata=facts))


def read_checkpoint(path: str | os.PathLike[str], who: str) -> Standing | None:
    """What was written for the same training; None where there is nothing, something else, or something damaged."""
    if not Path(path).is_file():
        return None
    with suppress(SafetensorError, OSError, ValueError, KeyError), safe_open(path, framework="pt") as file:
        found = file.metadata() or {}
        if found.get("who") == who:
            tensors = {name: file.get_tensor(name) for name in json.loads(found["names"])}
            if checksum(tensors) == found["checksum"]:
                return Standing(json.loads(found["facts"]), tensors)
    return None


def trained_to_plain(trained: Trained) -> dict[str, Any]:
    """All of it but the weights, as plain values."""
    return {"outcome": asdict(trained.outcome), "seconds": trained.seconds}


def trained_from_plain(plain: Mapping[str, Any], weights: dict[str, Tensor]) -> Trained:
    outcome = dict(plain["outcome"])
    outcome |= {"curve": tuple(outcome["curve"]), "notes": tuple(outcome["notes"])}
    return Trained(weights, Outcome(**outcome), plain["seconds"])


def under(tensors: Mapping[str, Tensor], folder: str) -> dict[str, Tensor]:
    """Those whose names begin with the folder, without it."""
    return {name.removeprefix(f"{folder}/"): each for name, each in tensors.items() if name.startswith(f"{folder}/")}


def placed_under(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{folder}/{name}": each for name, each in tensors.items()}
