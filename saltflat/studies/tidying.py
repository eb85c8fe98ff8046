"""The parts of a study as people write them, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saltflat.errors import StudyError
from saltflat.studies.canonical import to_json_value


def parse_mapping(given: Any, what: str) -> dict[str, Any]:
    """Names with values, such as the settings."""
    if given is None:  # a name in YAML with nothing behind it
        return {}
    if not isinstance(given, Mapping):
        raise StudyError(
            f"Got {what}={given!r}, a {type(given).__name__}. Want names with values. Do: for instance {what}: {{...}}."
        )
    return dict(to_json_value(given, what))


def parse_axes(given: Any) -> dict[str, tuple[Any, ...]]:
    """Names with lists of values."""
    if not isinstance(given, Mapping):
        raise StudyError(
            f"Got axes={given!r}, a {type(given).__name__}. Want names with lists of values. "
            "Do: for instance axes: {lr: [0.1, 0.2]}."
        )
    axes = to_json_value(given, "axes")
    for name, values in axes.items():
        if not isinstance(values, list):
            raise StudyError(
                f"Got the axis {name!r} with {values!r}. Want a list of values. Do: write [{values!r}], or put one "
                "value into settings."
            )
    return {name: tuple(values) for name, values in axes.items()}


def parse_seeds(given: Any) -> tuple[Any, ...]:
    """A list, or so many from 0.

    Example:
        >>> parse_seeds(3), parse_seeds([7, 9])
        ((0, 1, 2), (7, 9))
    """
    seeds = to_json_value(given, "seeds")
    if isinstance(seeds, list):
        return tuple(seeds)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 0:
        raise StudyError(f"Got seeds={given!r}. Want a count from 1, or a list of whole numbers. Do: seeds: 3.")
    if seeds > 100_000:
        raise StudyError(f"Got {seeds:,} seeds. Want at most 100,000 runs. Do: take fewer.")
    return tuple(range(seeds))


def parse_together(given: Any) -> int:
    """How many networks are trained at once."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise StudyError(f"Got together={given!r}. Want a whole number from 1. Do: leave it out for 64.")
    return given
