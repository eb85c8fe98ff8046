"""Where a training stands, on disk, so that it can go on after it was interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from saltflat.errors import StudyError
from saltflat.report.file import replacing
from saltflat.studies.examples import Examples
from saltflat.studies.integrity import DamageError, checksum, explain, is_there, read_tensors, tensor_bytes
from saltflat.studies.recipe import Recipe
from saltflat.studies.row_file import outcome_from_dict
from saltflat.studies.trained import Trained

FORM = "saltflat.checkpoint/1"
# What earlier versions wrote beside the tensors.
OLD_FACTS = ("who", "facts", "names")
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
        "key": Path(path).stem,
        "who": who,
        "facts": json.dumps(standing.facts),
        "names": json.dumps(list(tensors)),
    }
    with replacing(path, follow_links=False) as part:
        part.write_bytes(tensor_bytes(tensors, facts))


def load_checkpoint(path: Path) -> tuple[str, Standing]:
    """Return whose checkpoint a file is, and what it holds; a DamageError if it is not what was written."""
    tensors, found = read_tensors(path, OLD_FACTS)
    if found.get("key", path.stem) != path.stem:
        raise DamageError(path, f"it is of the training {found['key']!r}")
    try:
        standing = Standing(json.loads(found["facts"]), {name: tensors[name] for name in json.loads(found["names"])})
        _check_form(standing)
        return found["who"], standing
    except Exception as problem:  # earlier versions had no digest over these
        raise DamageError(path, explain(problem)) from problem


def read_checkpoint(path: str | os.PathLike[str], who: str) -> Standing | None:
    """What was written for the same training; None where there is nothing, something else, or something damaged."""
    try:
        owner, standing = load_checkpoint(Path(path)) if is_there(Path(path)) else (None, None)
    except StudyError:  # damaged, or closed to us
        return None
    return standing if owner == who else None


def _check_form(standing: Standing) -> None:
    """Raise an error unless the facts are such as a training writes, alone or together with others."""
    facts = standing.facts
    if "stacks" in facts:
        for each in facts["finished"].values():
            _check_plain(each)
        for place, stack in enumerate(facts["stacks"]):
            members = len(stack["members"])
            own = under(standing.tensors, f"stack/{place}")
            _check_all(int, [*stack["members"], stack["epoch"]])
            _check_all(str, stack["notes"])
            if own and members:
                if any(len(each) != members for each in (stack["curves"], stack["seconds"], *own.values())):
                    raise ValueError("its networks are not as many as it says")
                _check_all(float, [*stack["seconds"], *(loss for curve in stack["curves"] for loss in curve)])
                if any(len(curve) != stack["epoch"] for curve in stack["curves"]):
                    raise ValueError("its epochs are not as many as it says")
    elif "trained" in facts:
        _check_plain(facts["trained"])
    else:
        _check_all(int, [facts["epoch"]])
        _check_all(float, [facts["seconds"], *facts["curve"]])
        if len(facts["curve"]) != facts["epoch"]:
            raise ValueError("its epochs are not as many as it says")


def _check_plain(plain: Mapping[str, Any]) -> None:
    _check_all(float, [trained_from_plain(plain, {}).seconds])


def _check_all(kind: type, values: Iterable[Any]) -> None:
    wrong = [value for value in values if type(value) is not kind]
    if wrong:
        raise TypeError(f"it has {wrong[0]!r} where a {kind.__name__} belongs")


def trained_to_plain(trained: Trained) -> dict[str, Any]:
    """All of it but the weights, as plain values."""
    return {"outcome": asdict(trained.outcome), "seconds": trained.seconds}


def trained_from_plain(plain: Mapping[str, Any], weights: dict[str, Tensor]) -> Trained:
    return Trained(weights, outcome_from_dict(plain["outcome"]), plain["seconds"])


def under(tensors: Mapping[str, Tensor], folder: str) -> dict[str, Tensor]:
    """Those whose names begin with the folder, without it."""
    return {name.removeprefix(f"{folder}/"): each for name, each in tensors.items() if name.startswith(f"{folder}/")}


def placed_under(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{folder}/{name}": each for name, each in tensors.items()}
