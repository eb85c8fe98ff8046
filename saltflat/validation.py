"""Checks of the arguments of public calls: amounts, counts, flags, names and sizes."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Container
from typing import Any, SupportsIndex

import torch

from saltflat.errors import DeviceError, OptionError, format_error_line

LARGEST = sys.float_info.max  # whole numbers of Python's go beyond, and are infinite as others
MOST = 10**7  # of anything: a slip of the keyboard beyond


def is_choice(value: Any, choices: Container[str]) -> bool:
    """Whether a value is one of some names; arrays and tensors, which have no single truth, are not."""
    return isinstance(value, str) and value in choices


def parse_integer(value: Any) -> int | None:
    """The value as a whole number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # arrays and classes have the method, too
        return None


def check_flag(**given: bool) -> None:
    """Switches are True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise OptionError(
                f"Expected True or False, but got {name}={value!r}. Try leaving it out for the usual one."
            )


def check_positive(**given: float) -> None:
    """Radii, steps and the like are positive and finite."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise OptionError(
                f"Expected a positive number, but got {name}={value!r}. Try leaving it out for the usual one."
            )


def check_count(least: int, **given: int) -> None:
    """Draws and steps are whole numbers of at least ``least``."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise OptionError(
                f"Expected a whole number from {least} to {MOST}, but got {name}={value!r}. Try leaving it out for "
                "the usual one."
            )


def check_non_negative(**given: float) -> None:
    """Strengths are finite and at least 0."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            raise OptionError(
                f"Expected a number of at least 0, but got {name}={value!r}. Try leaving it out for the usual one."
            )


def parse_bytes(memory: str | int) -> int:
    """
    >>> parse_bytes("1GiB"), parse_bytes("500 MB"), parse_bytes(4096)
    (1073741824, 500000000, 4096)
    """
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(memory), re.IGNORECASE)
    size = float(match[1]) * units[match[2].lower()] if match and match[2].lower() in units else 0.0
    if not 1 <= size < 2**63:
        raise OptionError(f"Expected a positive size, but got memory={memory!r}. Try memory='2GiB' or '500MB'.")
    return int(size)


def check_seed(seed: SupportsIndex) -> int:
    number = parse_integer(seed)
    if number is None or not 0 <= number < 2**63:
        raise OptionError(f"Expected a whole number from 0 to 2^63 - 1, but got seed={seed!r}. Try seed=0.")
    return number


def parse_device(device: str | torch.device, probe: bool = True) -> torch.device:
    """Return the device of this name, after checking that it can be used.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` ..., a :class:`torch.device`, or ``"auto"`` for a GPU if CUDA is
            available and the CPU otherwise.
        probe: whether to allocate a tensor on it. Pass False if another process will use the device.

    Example:
        >>> parse_device("cpu")
        device(type='cpu')
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        if probe:
            torch.empty(1, device=found).tolist()  # fails on the meta device, which holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise DeviceError(
            f"Expected a device that torch can use here, but got {str(device)!r} ({format_error_line(error)}). "
            "Try device='cpu'."
        ) from error
    return found
