"""Import and call the user's own code, named as package.module:function, and report its errors."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

import saltflat
from saltflat.errors import OptionError, SaltflatError, make_unknown_name_error

T = TypeVar("T")
OURS = os.path.dirname(saltflat.__file__) + os.sep
LIBRARIES = (
    "<",  # code without a file, such as Python's own import machinery
    OURS,
    os.path.dirname(torch.__file__) + os.sep,
    *(sysconfig.get_path(each) + os.sep for each in ("stdlib", "purelib", "platlib")),
)


class UserCodeError(SaltflatError, RuntimeError):
    """The user's own code failed; its error is the cause."""


@contextmanager
def wrap_user_errors(spec: str, what: str) -> Iterator[None]:
    """Convert every error inside, where only the user's code runs, to a :class:`UserCodeError`."""
    try:
        yield
    except SaltflatError:
        raise
    except (Exception, SystemExit) as error:
        advice = f"running {spec} by itself; --traceback shows the whole error"
        raise _make_user_error(error, spec, f"the {what} without an error", advice) from error


@contextmanager
def wrap_model_errors(model: str, data: str) -> Iterator[None]:
    """Convert errors inside that the user's model or data raise to a :class:`UserCodeError`; leave our own alone."""
    try:
        yield
    except SaltflatError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        last = max(i for i, frame in enumerate(frames) if frame.f_code.co_filename.startswith(OURS))
        beyond = frames[last + 1 :]
        advice = "running it by itself; --traceback shows the whole error"
        if any(frame.f_code is nn.Module._call_impl.__code__ for frame in beyond):
            raise _make_user_error(error, model, "a model that takes the data", advice) from error
        if any(_is_user_frame(frame) for frame in beyond):
            raise _make_user_error(error, data, "data that can be read", advice) from error
        raise


def _is_user_frame(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(LIBRARIES)


def _make_user_error(error: BaseException, spec: str, want: str, advice: str) -> UserCodeError:
    said = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().splitlines()
    got = type(error).__name__ + (f": {said[0][:300]}" if said else "")
    return UserCodeError(f"Expected {want}, but got {got} from {spec} ({_format_error_location(error)}). Try {advice}.")


def _format_error_location(error: BaseException) -> str:
    """Return the file and line of the user's code nearest to the error, or those of the error if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = list(traceback.walk_tb(error.__traceback__))
    frame, line = next((each for each in reversed(places) if _is_user_frame(each[0])), places[-1])
    return f"{frame.f_code.co_filename}:{line}"


def import_object(spec: str, what: str) -> Any:
    """Return the object named ``package.module:name``. Importing runs the module, as any import does.

    Example:
        >>> import_object("math:sqrt", "model")(9.0)
        3.0
    """
    module, _, name = spec.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise OptionError(
            f"Expected package.module:function, but got {spec!r} as the {what}. Try my_module:make for the function "
            "make in my_module.py."
        )
    with wrap_user_errors(spec, what):
        found: Any = _import_user_module(module, spec, what)
        path = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise _make_attribute_error(found, path, part)
            found, path = getattr(found, part), f"{path}.{part}"
    return found


def _import_user_module(module: str, spec: str, what: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # Only if this module itself is missing, not one that it imports.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise OptionError(
            f"Expected a module that Python can import, but got {spec!r} as the {what}, and no module {error.name!r} "
            "is found. Try running from the folder that contains it, or install it."
        ) from error


def _make_attribute_error(found: T, path: str, part: str) -> SaltflatError:
    known = [each for each in dir(found) if not each.startswith("_")]
    if known:
        return make_unknown_name_error(f"function in {path}", part, known)
    return OptionError(
        f"Expected package.module:function, but got {part!r} in {path}, a {type(found).__name__} without public "
        f"attributes. Try leaving .{part} out, or check the name."
    )


def build_from_spec(spec: str, what: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Call the function of this name and return its result; return a model or data of this name as it is.

    Example:
        >>> build_from_spec("fractions:Fraction", "data", {"numerator": 1, "denominator": 3})
        Fraction(1, 3)
    """
    found, given = import_object(spec, what), dict(arguments or {})
    if isinstance(found, nn.Module) or not callable(found):
        if given:
            raise OptionError(
                f"Expected a function that takes arguments, but got the arguments {given} for {spec!r}, a "
                f"{type(found).__name__}. Try leaving them out."
            )
        return found
    try:
        signature: inspect.Signature | None = inspect.signature(found)
    except ValueError:  # written in C, without a signature: the call itself checks
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
            f"Expected the arguments {', '.join(signature.parameters) or '(none)'}, but got {given} for {spec!r}: "
            f"{error}. Try other arguments, or give the function defaults."
        ) from error
