"""Encode values as strict JSON without loss, and check what is read back.

JSON has no nan and no infinity: they are written ``{"$float": "nan"}``, ``{"$float": "inf"}`` and
``{"$float": "-inf"}``. A key that itself begins with ``$`` gets a second one, so that nothing else is mistaken for
such a number. All other floats are written with enough digits to restore them bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from saltflat.errors import ReportError

NUMBER = "$float"


class ArrayLike(Protocol):
    """A tensor or an array."""

    def tolist(self) -> Any:
        """Return the numbers as nested lists."""


class Anything:
    """The structure of a value that may be anything."""


# What a file holds, and what can be converted to that.
JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Encodable: TypeAlias = "bool | int | float | str | ArrayLike | Sequence[Any] | Mapping[str, Any] | None"
# How a value must be built, see ``check_structure``.
Structure: TypeAlias = "type | Anything | tuple[Structure, ...] | list[Structure] | dict[str, Structure] | None"


def to_plain_types(value: Encodable, where: str) -> Any:
    """Convert a value to Python's own types: tensors and arrays become numbers and lists, tuples become lists.

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
        f"Expected numbers, strings, lists and mappings, which a file can hold, but got a {type(value).__name__} in "
        f"{where}. Try converting it with str(...)."
    )


def encode_nonfinite(value: JsonValue | Mapping[str, Any]) -> Any:
    """Encode nan and infinities in a plain value.

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
    """Return the key with a second ``$`` if it begins with one."""
    return "$" + key if key.startswith("$") else key


def decode_nonfinite(value: JsonValue | Mapping[str, Any]) -> Any:
    """Return what ``encode_nonfinite`` was given, with lists for tuples."""
    if isinstance(value, Mapping):
        if list(value) == [NUMBER]:
            number: Any = value[NUMBER]
            return float(number)
        return {key.removeprefix("$"): decode_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [decode_nonfinite(each) for each in value]
    return value


ANY = Anything()
EACH = "*"  # as the only key of a structure: for every key of a mapping

# The structure of those parts of a report that are mappings. A part may lack a key, and have others.
LEGEND: dict[str, Structure] = {
    EACH: {
        "meaning": str,
        "formula": str,
        "invariant_to": [str],
        "reference": str,
        "smaller": str,
        "logarithmic": bool,
    }
}
CERTIFICATE: dict[str, Structure] = {
    "holds": (bool, None),
    "gap": float,
    "examples": int,
    "gaps": {EACH: float},
    "failed": str,
}
SAMPLE: dict[str, Structure] = {"fingerprint": str, "groups": [int]}
MAPPING: dict[str, Structure] = {EACH: ANY}


def check_structure(value: JsonValue | Mapping[str, Any], structure: Structure, where: str) -> None:
    """Check that a value has a structure; raise a TypeError that says where it does not.

    Args:
        value: as it was decoded from JSON.
        structure: a type; ``[structure]`` for a list of such values; a mapping from keys to structures, or from
            ``"*"`` to that of every entry; a tuple of structures of which one must fit; None for null.
        where: the name of the value in the error.

    Example:
        >>> check_structure({"kappa": {"meaning": "How sharp.", "invariant_to": 3}}, LEGEND, "the legend")
        Traceback (most recent call last):
        TypeError: the legend, 'kappa', 'invariant_to' is no list
    """
    for wrong in _find_structure_errors(value, structure, where):
        raise TypeError(wrong)


def _find_structure_errors(value: JsonValue | Mapping[str, Any], structure: Structure, where: str) -> Iterator[str]:
    if isinstance(structure, Anything):
        return
    if isinstance(structure, tuple):
        if all(any(_find_structure_errors(value, each, where)) for each in structure):
            yield f"{where} is {_NAMES.get(type(value), 'a value')}, which it cannot be"
    elif isinstance(structure, list):
        if not isinstance(value, list):
            yield f"{where} is no list"
            return
        for entry in value:
            yield from _find_structure_errors(entry, structure[0], f"an entry of {where}")
    elif isinstance(structure, dict):
        if not isinstance(value, dict):
            yield f"{where} is no mapping"
            return
        for key, entry in value.items():
            yield from _find_structure_errors(entry, structure.get(EACH, structure.get(key, ANY)), f"{where}, {key!r}")
    elif structure is None:
        if value is not None:
            yield f"{where} is not null"
    # Other programs write 5.0 as 5.
    elif type(value) is not structure and not (structure is float and type(value) is int):
        yield f"{where} is no {_NAMES[structure]}"


_NAMES = {str: "text", bool: "truth value", int: "whole number", float: "number", list: "list", dict: "mapping"}
