"""Canonical values and digests of a study, and its settings as the first version of its files names them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from saltflat.errors import StudyError

# Part of every key: a run is known by its settings as version 1 names them.
FORMAT = 1
# Beyond this not every whole number is a float, and 1e300 is not meant as a whole number.
WHOLE = 2.0**53
# Levels of lists and mappings: a deeper value contains itself, or is meant to exhaust the reader.
DEEPEST = 20


class Array(Protocol):
    """An array of numpy or torch."""

    def tolist(self) -> Any:
        """Return it as nested lists."""


# A value that to_json_value accepts.
JsonLike: TypeAlias = "bool | int | float | str | Sequence[JsonLike] | Mapping[str, JsonLike] | Array | None"


def to_json_value(value: JsonLike, where: str, depth: int = 0) -> Any:
    """Return the value in JSON's own types: tuples become lists, numbers of numpy and torch Python's.

    Example:
        >>> to_json_value({"widths": (64, 32)}, "the settings")
        {'widths': [64, 32]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StudyError(f"Expected a finite number, but got {value} in {where}. Try giving one.")
        return float(value)
    if depth > DEEPEST:
        raise StudyError(f"Expected at most {DEEPEST} levels of lists and mappings in {where}, but got more.")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StudyError(f"Expected a string, but got the name {key!r} in {where}. Try putting it in quotes.")
        return {key: to_json_value(each, f"{where}, {key!r}", depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [to_json_value(each, where, depth + 1) for each in value]
    if hasattr(value, "tolist"):
        try:
            return to_json_value(value.tolist(), where, depth)
        except (TypeError, RuntimeError):  # a class, or a sparse tensor
            pass
    raise StudyError(
        f"Expected numbers, strings, lists and mappings, but got {value!r}, a {type(value).__name__}, in {where}. Try "
        "writing it as one of these."
    )


def canonicalize(value: JsonLike) -> Any:
    """Return one form for values that mean the same: 1.0 is 1, a tuple is a list.

    Example:
        >>> canonicalize([1.0, 0.5, True, (64.0,)])
        [1, 0.5, True, [64]]
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < WHOLE:
        return int(value)
    if isinstance(value, Mapping):
        return {key: canonicalize(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [canonicalize(each) for each in value]
    return value


def dump_canonical_json(value: JsonLike) -> str:
    """Return the canonical form as JSON, equal for values that mean the same.

    Example:
        >>> dump_canonical_json({"lr": 1.0, "width": 64}) == dump_canonical_json({"width": 64, "lr": 1})
        True
    """
    return json.dumps(canonicalize(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def compute_digest(value: JsonLike, tensors: Mapping[str, Tensor] = MappingProxyType({})) -> str:
    """Return sixteen hexadecimal digits that identify a value and the tensors, on the CPU, that belong to it.

    Example:
        >>> one = compute_digest({"lr": 1})
        >>> compute_digest({"lr": 1.0}) == one != compute_digest({"lr": 1}, {"weight": torch.zeros(2)})
        True
    """
    found = hashlib.sha256(dump_canonical_json(value).encode())
    for name in sorted(tensors):
        each = tensors[name].detach().contiguous()
        found.update(f"{name!r} {tuple(each.shape)} {each.dtype}".encode())
        # As bytes: numpy does not know every type of torch's.
        found.update(each.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def make_hashable(value: JsonLike) -> Any:
    """Return the value with lists as tuples at every level, so that it can be hashed."""
    return tuple(make_hashable(each) for each in value) if isinstance(value, list | tuple) else value


# Version 1 of the files has ``batch`` for batch_size, ``l2`` for weight_decay, and ``weight_decay`` for decoupled decay
# with any optimizer. Keys are digests of these names, so that finished runs are recognized.
_NAMES_1 = {"batch_size": "batch", "weight_decay": "l2"}
_NAMES_2 = {old: new for new, old in _NAMES_1.items()}


def to_version_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by their names in version 1.

    Example:
        >>> to_version_1({"optimizer": "adamw", "batch_size": 64, "weight_decay": 0.1})
        {'optimizer': 'adam', 'batch': 64, 'l2': 0.0, 'weight_decay': 0.1}
    """
    found = {_NAMES_1.get(name, name): value for name, value in config.items()}
    decoupled = config["optimizer"] == "adamw" and config["weight_decay"] > 0
    if decoupled:
        found |= {"optimizer": "adam", "l2": 0.0}
    return {**found, "weight_decay": config["weight_decay"] if decoupled else 0.0}


def config_from_version_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run of version 1 by their present names. Those of a user's train function stay.

    Example:
        >>> config_from_version_1({"optimizer": "sgd", "l2": 0.1, "weight_decay": 0.0, "batch": 64})
        {'optimizer': 'sgd', 'weight_decay': 0.1, 'batch_size': 64}
    """
    # A run of ours has all settings; a function of the user's may have taken one of these names.
    if not {"optimizer", "l2", "weight_decay", "batch"} <= config.keys():
        return dict(config)
    plain = {name: value for name, value in config.items() if name != "weight_decay"}
    if config["weight_decay"]:
        _check_translatable(config["optimizer"], config["l2"])
        plain |= {"optimizer": "adamw", "l2": config["weight_decay"]}
    return {_NAMES_2.get(name, name): value for name, value in plain.items()}


def study_from_version_1(study: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of a study of version 1 with the present names of its settings."""
    settings, axes = study.get("settings"), study.get("axes")
    if study.get("train") is not None or not isinstance(settings, Mapping) or not isinstance(axes, Mapping):
        return dict(study)
    settings = dict(settings)
    named = {name.strip() for axis in axes for name in axis.split(",")}
    if not settings.get("weight_decay", 0.0):
        settings.pop("weight_decay", None)
    if "weight_decay" in {*named, *settings}:
        _check_translatable(settings.get("optimizer"), "l2" if "l2" in named else settings.get("l2", 0.0))
        settings = {name: value for name, value in settings.items() if name != "l2"} | {"optimizer": "adamw"}
    return {
        **study,
        "settings": {_NAMES_2.get(name, name): value for name, value in settings.items()},
        "axes": {
            ", ".join(_NAMES_2.get(name.strip(), name.strip()) for name in axis.split(",")): values
            for axis, values in axes.items()
        },
    }


def columns_to_version_1(columns: Iterable[str], optimizer: str | None) -> list[str]:
    """Return the columns of a table by their names in version 1, for a study with this optimizer.

    Example:
        >>> columns_to_version_1(["batch_size", "weight_decay", "seed"], "sgd")
        ['batch', 'l2', 'seed']
    """
    kept = {"weight_decay"} if optimizer == "adamw" else set()
    return [name if name in kept else _NAMES_1.get(name, name) for name in columns]


def _check_translatable(optimizer: str | None, l2: float | str) -> None:
    """Check that a decoupled weight decay of version 1 is that of AdamW."""
    if optimizer != "adam" or l2:
        raise StudyError(
            f"Expected a weight decay as torch.optim has it, but got one of an earlier version, decoupled, with the "
            f"optimizer {optimizer!r} and l2={l2!r}. Try reading these files with the saltflat that wrote them."
        )
