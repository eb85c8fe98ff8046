"""Checkpoints of a training, so that it can resume after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from saltflat.errors import StudyError
from saltflat.results.files import replace_atomically
from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.store.rows import (
    DamageError,
    compute_checksum,
    explain_damage,
    has_file,
    outcome_from_dict,
    read_tensors,
    serialize_tensors,
)

FORM = "saltflat.checkpoint/1"
# Metadata that earlier versions wrote.
OLD_FACTS = ("who", "facts", "names")
# Examples that are compared to recognize the data.
SAMPLE = 512


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: plain values, and tensors by name."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def describe_training(recipes: Sequence[Recipe], examples: Examples, **options: object) -> str:
    """Return a text that is equal for trainings that can share a checkpoint: recipes, data and options."""
    plain = [{**_get_settings(recipe), "architecture": dict(recipe.architecture)} for recipe in recipes]
    data = [
        _compute_sample_checksum(part)
        for part in (examples.train_inputs, examples.train_labels, examples.test_inputs, examples.test_labels)
    ]
    return json.dumps({"form": FORM, "recipes": plain, "data": data, "options": options}, sort_keys=True)


def _get_settings(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__ if name != "architecture"}


def _compute_sample_checksum(tensor: Tensor) -> list[Any]:
    rows = tensor[:: max(1, len(tensor) // SAMPLE)].contiguous().cpu()
    return [list(tensor.shape), compute_checksum({"rows": rows})]


def write_checkpoint(path: str | os.PathLike[str], who: str, standing: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    tensors = {name: each.detach().cpu().contiguous() for name, each in standing.tensors.items()}
    # The file sorts names, so the order of a state_dict is stored as well.
    facts = {
        "key": Path(path).stem,
        "who": who,
        "facts": json.dumps(standing.facts),
        "names": json.dumps(list(tensors)),
    }
    with replace_atomically(path, follow_links=False) as part:
        part.write_bytes(serialize_tensors(tensors, facts))


def load_checkpoint(path: Path) -> tuple[str, Checkpoint]:
    """Return the training that a checkpoint belongs to, and its content; raise a DamageError if the file changed."""
    tensors, found = read_tensors(path, OLD_FACTS)
    if found.get("key", path.stem) != path.stem:
        raise DamageError(path, f"it is of the training {found['key']!r}")
    try:
        standing = Checkpoint(json.loads(found["facts"]), {name: tensors[name] for name in json.loads(found["names"])})
        _check_facts(standing)
        return found["who"], standing
    except Exception as problem:  # earlier versions had no digest over these
        raise DamageError(path, explain_damage(problem)) from problem


def read_matching_checkpoint(path: str | os.PathLike[str], who: str) -> Checkpoint | None:
    """Return the checkpoint of this training; None if there is none, or it is damaged or of another training."""
    try:
        owner, standing = load_checkpoint(Path(path)) if has_file(Path(path)) else (None, None)
    except StudyError:  # damaged or not readable
        return None
    return standing if owner == who else None


def _check_facts(standing: Checkpoint) -> None:
    """Check that the facts have the form that a training writes."""
    facts = standing.facts
    if "stacks" in facts:
        for each in facts["finished"].values():
            _check_trained_dict(each)
        for place, stack in enumerate(facts["stacks"]):
            members = len(stack["members"])
            own = select_prefix(standing.tensors, f"stack/{place}")
            _check_types(int, [*stack["members"], stack["epoch"]])
            _check_types(str, stack["notes"])
            if own and members:
                if any(len(each) != members for each in (stack["curves"], stack["seconds"], *own.values())):
                    raise ValueError("its networks are not as many as it says")
                _check_types(float, [*stack["seconds"], *(loss for curve in stack["curves"] for loss in curve)])
                if any(len(curve) != stack["epoch"] for curve in stack["curves"]):
                    raise ValueError("its epochs are not as many as it says")
    elif "trained" in facts:
        _check_trained_dict(facts["trained"])
    else:
        _check_types(int, [facts["epoch"]])
        _check_types(float, [facts["seconds"], *facts["curve"]])
        if len(facts["curve"]) != facts["epoch"]:
            raise ValueError("its epochs are not as many as it says")


def _check_trained_dict(plain: Mapping[str, Any]) -> None:
    _check_types(float, [trained_from_dict(plain, {}).seconds])


def _check_types(kind: type, values: Iterable[Any]) -> None:
    wrong = [value for value in values if type(value) is not kind]
    if wrong:
        raise TypeError(f"it has {wrong[0]!r} where a {kind.__name__} belongs")


def trained_to_dict(trained: TrainedNetwork) -> dict[str, Any]:
    """Return everything but the weights as plain values."""
    return {"outcome": asdict(trained.outcome), "seconds": trained.seconds}


def trained_from_dict(plain: Mapping[str, Any], weights: dict[str, Tensor]) -> TrainedNetwork:
    """Return the network that ``trained_to_dict`` was called on."""
    return TrainedNetwork(weights, outcome_from_dict(plain["outcome"]), plain["seconds"])


def select_prefix(tensors: Mapping[str, Tensor], folder: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``folder/``, without that prefix."""
    return {name.removeprefix(f"{folder}/"): each for name, each in tensors.items() if name.startswith(f"{folder}/")}


def add_prefix(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with ``folder/`` before their names."""
    return {f"{folder}/{name}": each for name, each in tensors.items()}
