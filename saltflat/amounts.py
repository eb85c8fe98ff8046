"""Options that are amounts: sizes and counts."""

from __future__ import annotations

from saltflat.errors import OptionError


def check_positive(**given: float) -> None:
    """Radii, steps and the like are positive and finite."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise OptionError(f"Got {name}={value!r}. Want a positive number. Do: leave it out for the usual one.")


def check_count(least: int, **given: int) -> None:
    """Draws and steps are whole numbers of at least ``least``."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(
                f"Got {name}={value!r}. Want a whole number of at least {least}. Do: leave it out for the usual one."
            )
