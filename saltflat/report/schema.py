"""What the parts of a file must be, checked once when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
