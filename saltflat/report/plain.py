"""Values as strict JSON can carry them, exactly.

JSON has no nan and no infinity: they are written ``{"$float": "nan"}``, ``{"$float": "inf"}`` and
``{"$float": "-inf"}``. A key that itself begins with ``$`` gets a second one, so that nothing else can be taken for
such a number. All other floats are written with the digits that give them back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from saltflat.errors import ReportError

NUMBER = "$float"


def to_plain_types(value: Any, where: str) -> Any:
    """The value in Python's own types: tensors and arrays become numbers and lists, tuples become lists.

    Example:
        >>> import torch
        >>> to_plain_types({"scales": torch.ones(2), "sides": ("row", 3)}, "the details")
        {'scales': [1.0, 1.0], 'sides': ['row', 3]}
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain_types(each, f"{where}, {key!r}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_types(each, where) for each in value]
    if hasattr(value, "tolist"):
        return to_plain_types(value.tolist(), where)
    raise ReportError(
        f"Got a {type(value).__name__} in {where}. Want numbers, texts, lists and mappings, which a file can hold. "
        "Do: write it as a text, str(...)."
    )


def encode_nonfinite(value: Any) -> Any:
    """A plain value with its nan and infinities coded.

    Example:
        >>> encode_nonfinite({"gap": float("inf"), "$cost": 3})
        {'gap': {'$float': 'inf'}, '$$cost': 3}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: repr(value)}
    if isinstance(value, Mapping):
        return {encode_key(key): encode_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [encode_nonfinite(each) for each in value]
    return value


def encode_key(key: str) -> str:
    return "$" + key if key.startswith("$") else key


def decode_nonfinite(value: Any) -> Any:
    """What ``encode_nonfinite`` was given, with lists for tuples."""
    if isinstance(value, Mapping):
        if list(value) == [NUMBER]:
            return float(value[NUMBER])
        return {key.removeprefix("$"): decode_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [decode_nonfinite(each) for each in value]
    return value
