"""What the user's own code has under the name package.module:function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from saltflat.errors import OptionError, SaltflatError, make_unknown_name_error
from saltflat.readers.foreign import wrap_user_errors


def import_object(spec: str, what: str) -> Any:
    """What ``package.module:name`` stands for. Importing runs the module, as any import does.

    Example:
        >>> import_object("math:sqrt", "model")(9.0)
        3.0
    """
    module, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise OptionError(
            f"Got {spec!r} as the {what}. Want package.module:function. "
            "Do: for instance my_module:make for the function make in my_module.py."
        )
    with wrap_user_errors(spec, what):
        found, path = _import_user_module(module, spec, what), module
        for part in name.split("."):
            if not hasattr(found, part):
                raise _make_attribute_error(found, path, part)
            found, path = getattr(found, part), f"{path}.{part}"
    return found


def _import_user_module(module: str, spec: str, what: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # Only if it is this module that is missing; what the module itself fails to import is its own affair.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise OptionError(
            f"Got {spec!r} as the {what}, and no module {error.name!r} is found. Want one that Python can import. "
            "Do: run from the folder that holds it, or install it."
        ) from error


def _make_attribute_error(found: Any, path: str, part: str) -> SaltflatError:
    known = [each for each in dir(found) if not each.startswith("_")]
    if known:
        return make_unknown_name_error(f"function in {path}", part, known)
    return OptionError(
        f"Got {part!r} in {path}, a {type(found).__name__} with nothing in it. Want package.module:function. "
        f"Do: leave .{part} out, or check the name."
    )


def build_from_spec(spec: str, what: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """What the function of this name returns for these arguments; a model or data that has a name is taken as it is.

    Example:
        >>> build_from_spec("fractions:Fraction", "data", {"numerator": 1, "denominator": 3})
        Fraction(1, 3)
    """
    found, given = import_object(spec, what), dict(arguments or {})
    if isinstance(found, nn.Module) or not callable(found):
        if given:
            raise OptionError(
                f"Got the arguments {given} for {spec!r}, a {type(found).__name__}. Want a function to give them to. "
                "Do: leave them out."
            )
        return found
    try:
        signature: inspect.Signature | None = inspect.signature(found)
    except ValueError:  # written in C, without a signature: the call will tell
        signature = None
    if signature is not None:
        _check_factory_arguments(signature, given, spec)
    with wrap_user_errors(spec, what):
        return found(**given)


def _check_factory_arguments(signature: inspect.Signature, given: Mapping[str, Any], spec: str) -> None:
    try:
        signature.bind(**given)
    except TypeError as error:
        raise OptionError(
            f"Got the arguments {given} for {spec!r}: {error}. Want {', '.join(signature.parameters) or 'none'}. "
            "Do: give others, or defaults to the function."
        ) from error
