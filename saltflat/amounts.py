"""Options that are amounts: sizes and counts."""

from __future__ import annotations

import sys

from saltflat.errors import OptionError

LARGEST = sys.float_info.max  # whole numbers of Python's go beyond, and are infinite as others
MOST = 10**7  # of anything: a slip of the keyboard beyond


def check_positive(**given: float) -> None:
    """Radii, steps and the like are positive and finite."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise OptionError(f"Got {name}={value!r}. Want a positive number. Do: leave it out for the usual one.")


def check_count(least: int, **given: int) -> None:
    """Draws and steps are whole numbers of at least ``least``."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise OptionError(
                f"Got {name}={value!r}. Want a whole number from {least} to {MOST}. Do: leave it out for the usual one."
            )


def check_amount(**given: float) -> None:
    """Strengths are finite and at least 0."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            raise OptionError(f"Got {name}={value!r}. Want a number of at least 0. Do: leave it out for the usual one.")
