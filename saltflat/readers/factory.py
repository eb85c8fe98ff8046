"""What the user's own code has under the name package.module:function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from saltflat.errors import OptionError, unknown


def named(spec: str, what: str) -> Any:
    """What ``package.module:name`` stands for. Importing runs the module, as any import does.

    Example:
        >>> named("math:sqrt", "model")(9.0)
        3.0
    """
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise OptionError(
            f"Got {spec!r} as the {what}. Want package.module:function. "
            f"Do: for instance my_{what}s:make for the function make in my_{what}s.py."
        )
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        # Only if it is this module that is missing; what the module itself fails to import is its own affair.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise OptionError(
            f"Got {spec!r} as the {what}, and no module {error.name!r} is found. Want one that Python can import. "
            "Do: run from the folder that holds it, or install it."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise unknown(f"function in {module}", part, [each for each in dir(found) if not each.startswith("_")])
        found = getattr(found, part)
    return found


def made(spec: str, what: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """What the function of this name returns for these arguments; a model or data that has a name is taken as it is.

    Example:
        >>> made("fractions:Fraction", "data", {"numerator": 1, "denominator": 3})
        Fraction(1, 3)
    """
    found, given = named(spec, what), dict(arguments or {})
    if isinstance(found, nn.Module) or not callable(found):
        if given:
            raise OptionError(
                f"Got the arguments {given} for {spec!r}, a {type(found).__name__}. Want a function to give them to. "
                "Do: leave them out."
            )
        return found
    try:
        signature = inspect.signature(found)
    except ValueError:  # written in C, without a signature: the call will tell
        return found(**given)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise OptionError(
            f"Got the arguments {given} for {spec!r}: {error}. Want {', '.join(signature.parameters) or 'none'}. "
            "Do: give others, or defaults to the function."
        ) from error
    return found(**given)
