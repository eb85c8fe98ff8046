"""Values as a study writes them down: the same value has one form, wherever it came from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from saltflat.errors import StudyError

# Part of every key: another format of what determines a training is another run.
FORMAT = 1
# Beyond this not every whole number is a float, and 1e300 is not meant as a whole number.
WHOLE = 2.0**53
# Levels of lists and mappings: what is deeper holds itself, or is made to exhaust the reader.
DEEPEST = 20


def to_json_value(value: Any, where: str, depth: int = 0) -> Any:
    """The value in JSON's own types, tuples as lists; numbers of numpy and torch become Python's.

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
                raise StudyError(f"Expected a text, but got the name {key!r} in {where}. Try putting it in quotes.")
        return {key: to_json_value(each, f"{where}, {key!r}", depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [to_json_value(each, where, depth + 1) for each in value]
    if hasattr(value, "tolist"):
        try:
            return to_json_value(value.tolist(), where, depth)
        except (TypeError, RuntimeError):  # a class, or a sparse tensor
            pass
    raise StudyError(
        f"Expected numbers, texts, lists and mappings, but got {value!r}, a {type(value).__name__}, in {where}. Try "
        "writing it as one of these."
    )


def canonicalize(value: Any) -> Any:
    """One form for values that mean the same: 1.0 is 1, a tuple is a list.

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


def dump_canonical_json(value: Any) -> str:
    """The canonical form as JSON, equal for what means the same.

    Example:
        >>> dump_canonical_json({"lr": 1.0, "batch": 64}) == dump_canonical_json({"batch": 64, "lr": 1})
        True
    """
    return json.dumps(canonicalize(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def compute_digest(value: Any, tensors: Mapping[str, Tensor] = MappingProxyType({})) -> str:
    """Return sixteen hexadecimal digits that stand for a value, and for the tensors on the CPU that belong to it.

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


def make_hashable(value: Any) -> Any:
    """Lists as tuples, all the way down, so that the value can be hashed."""
    return tuple(make_hashable(each) for each in value) if isinstance(value, list | tuple) else value
