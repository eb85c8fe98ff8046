"""Values as a study writes them down: the same value has one form, wherever it came from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from saltflat.errors import StudyError

# Part of every key: another format of what determines a training is another run.
FORMAT = 1
# Beyond this not every whole number is a float, and 1e300 is not meant as a whole number.
WHOLE = 2.0**53


def json_value(value: Any, where: str) -> Any:
    """The value in JSON's own types, tuples as lists; numbers of numpy and torch become Python's.

    Example:
        >>> json_value({"widths": (64, 32)}, "the settings")
        {'widths': [64, 32]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StudyError(f"Got {value} in {where}. Want a finite number. Do: give one.")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StudyError(f"Got the name {key!r} in {where}. Want a text. Do: put it in quotes.")
        return {key: json_value(each, f"{where}, {key!r}") for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [json_value(each, where) for each in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist(), where)
    raise StudyError(
        f"Got {value!r}, a {type(value).__name__}, in {where}. Want numbers, texts, lists and mappings. "
        "Do: write it as one of these."
    )


def canonical(value: Any) -> Any:
    """One form for values that mean the same: 1.0 is 1, a tuple is a list.

    Example:
        >>> canonical([1.0, 0.5, True, (64.0,)])
        [1, 0.5, True, [64]]
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < WHOLE:
        return int(value)
    if isinstance(value, Mapping):
        return {key: canonical(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    return value


def text_of(value: Any) -> str:
    """The canonical form as JSON, equal for what means the same.

    Example:
        >>> text_of({"lr": 1.0, "batch": 64}) == text_of({"batch": 64, "lr": 1})
        True
    """
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits that stand for a value."""
    return hashlib.sha256(text_of(value).encode()).hexdigest()[:16]


def frozen(value: Any) -> Any:
    """Lists as tuples, all the way down, so that the value can be hashed."""
    return tuple(frozen(each) for each in value) if isinstance(value, list | tuple) else value
