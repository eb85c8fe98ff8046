"""Names as they are typed: of measures, of devices, of precisions."""

from __future__ import annotations

import torch

from saltflat.errors import DeviceError, OptionError, format_error_line, make_unknown_name_error

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def parse_names(given: list[str] | None) -> list[str] | None:
    """Names that came with commas, one by one, or both; commas inside of parentheses belong to the name.

    Example:
        >>> parse_names(["rho(axis='row', p=2),trace", "frobenius"])
        ["rho(axis='row', p=2)", 'trace', 'frobenius']
    """
    if not given:
        return None
    names, depth = [""], 0
    for letter in ",".join(given):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    names = [name.strip() for name in names if name.strip()]
    if depth != 0 or not names:
        raise OptionError(
            f"Got the names {', '.join(given)!r}. Want at least one, with as many closing as opening parentheses. "
            "Do: quote names with options, \"rho(axis='row')\"."
        )
    return names


def parse_dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise make_unknown_name_error("dtype", name, DTYPES)
    return None if name is None else DTYPES[name]


def parse_device(name: str) -> torch.device:
    """The device of this name, if it is there."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).tolist()  # the meta device has no numbers to give
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"Got the device {name!r}, which cannot be used here ({format_error_line(error)}). "
            "Want one that torch can reach. Do: --device cpu."
        ) from error
    return device
