"""Write results to disk as strict JSON, atomically, read them back with checks, and build data frames of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeAlias

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


def _convert_notes(notes: str | Iterable[str]) -> tuple[str, ...]:
    return (notes,) if isinstance(notes, str) else tuple(str(note) for note in notes)


# By field. Tensors and numpy numbers become Python's, so that a result holds no device memory and can be written.
CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "model": str,
    "examples": int,
    "loss": float,
    "settings": lambda settings: to_plain_types(settings, "the settings"),
    "versions": lambda versions: {str(name): str(version) for name, version in versions.items()},
    "seconds": float,
    "notes": _convert_notes,
    "created": str,
}


class JsonRecord:
    """A dataclass that converts to strict JSON; two are equal if their JSON is, so that nan equals nan.

    Attributes:
        optional_fields: fields left out of the JSON where they are None or empty, as files of earlier versions do.
    """

    optional_fields: ClassVar[tuple[str, ...]] = ()

    def _convert_fields(self, **converted: Any) -> None:
        """Set fields to converted values, and those that most results have to Python's own types."""
        for each in fields(self):  # type: ignore[arg-type]
            if each.name in converted or each.name in CONVERTERS:
                value = getattr(self, each.name)
                value = converted[each.name] if each.name in converted else CONVERTERS[each.name](value)
                object.__setattr__(self, each.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as strict JSON; nan and infinities are encoded, see ``saltflat.results.json_codec``."""
        return self._encode_fields()

    def _encode_fields(self, without: Iterable[str] = ()) -> dict[str, Any]:
        names = [each.name for each in fields(self) if each.name not in without]  # type: ignore[arg-type]
        return {
            name: encode_nonfinite(to_plain_types(getattr(self, name), name))
            for name in names
            if name not in self.optional_fields or getattr(self, name) not in (None, {}, ())
        }

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
