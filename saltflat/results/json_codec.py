"""Values as strict JSON can carry them, exactly, and checks of what is read back.

JSON has no nan and no infinity: they are written ``{"$float": "nan"}``, ``{"$float": "inf"}`` and
``{"$float": "-inf"}``. A key that itself begins with ``$`` gets a second one, so that nothing else can be taken for
such a number. All other floats are written with the digits that give them back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
        f"Expected numbers, texts, lists and mappings, which a file can hold, but got a {type(value).__name__} in "
        f"{where}. Try writing it as a text, str(...)."
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


ANY = object()
EACH = "*"  # as the only key of a form: for every key of a mapping

# What is known of the parts of a report that are mappings. A part may lack a key, and have others.
LEGEND = {
    EACH: {
        "meaning": str,
        "formula": str,
        "invariant_to": [str],
        "reference": str,
        "smaller": str,
        "logarithmic": bool,
    }
}
CERTIFICATE = {"holds": (bool, None), "gap": float, "examples": int, "gaps": {EACH: float}, "failed": str}
SAMPLE = {"fingerprint": str, "groups": [int]}
MAPPING = {EACH: ANY}


def check_structure(value: Any, form: Any, where: str) -> None:
    """Raise a TypeError that says what is wrong with a value, if anything is.

    Args:
        value: as it was decoded from JSON.
        form: a type; ``[form]`` for a list of such values; a mapping from keys to forms, or from ``"*"`` to the form of
            every entry; a tuple of forms of which one must fit; None for null.
        where: what the value is called.

    Example:
        >>> check_structure({"meaning": "How sharp.", "invariant_to": 3}, LEGEND[EACH], "the legend")
        Traceback (most recent call last):
        TypeError: the legend, 'invariant_to' is no list
    """
    for wrong in _find_structure_errors(value, form, where):
        raise TypeError(wrong)


def _find_structure_errors(value: Any, form: Any, where: str) -> Iterator[str]:
    if form is ANY:
        return
    if isinstance(form, tuple):
        if all(any(_find_structure_errors(value, each, where)) for each in form):
            yield f"{where} is {_NAMES.get(type(value), 'a value')}, which it cannot be"
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{where} is no list"
            return
        for entry in value:
            yield from _find_structure_errors(entry, form[0], f"an entry of {where}")
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            yield f"{where} is no mapping"
            return
        for key, entry in value.items():
            yield from _find_structure_errors(entry, form.get(EACH, form.get(key, ANY)), f"{where}, {key!r}")
    elif form is None:
        if value is not None:
            yield f"{where} is not null"
    # Other programs write 5.0 as 5.
    elif type(value) is not form and not (form is float and type(value) is int):
        yield f"{where} is no {_NAMES[form]}"


_NAMES = {str: "text", bool: "truth value", int: "whole number", float: "number", list: "list", dict: "mapping"}
