"""Errors of the user's own code: one line that says where, apart from errors of ours."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import nn

import saltflat
from saltflat.errors import SaltflatError

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
    """Inside of it nothing but the user's code runs: whatever fails is an error of that code."""
    try:
        yield
    except SaltflatError:
        raise
    except (Exception, SystemExit) as error:
        advice = f"see that {spec} works by itself; --traceback shows all of the error"
        raise _make_user_error(error, spec, f"the {what} without an error", advice) from error


@contextmanager
def wrap_model_errors(model: str, data: str) -> Iterator[None]:
    """Inside of it our code calls the user's model and reads the data: what fails in these is theirs, the rest ours."""
    try:
        yield
    except SaltflatError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        last = max(i for i, frame in enumerate(frames) if frame.f_code.co_filename.startswith(OURS))
        beyond = frames[last + 1 :]
        advice = "see that it works by itself; --traceback shows all of the error"
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
    return UserCodeError(f"Got {got} from {spec} ({_format_error_location(error)}). Want {want}. Do: {advice}.")


def _format_error_location(error: BaseException) -> str:
    """File and line of the user's that is nearest to the error; where there is none, of the error itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = list(traceback.walk_tb(error.__traceback__))
    frame, line = next((each for each in reversed(places) if _is_user_frame(each[0])), places[-1])
    return f"{frame.f_code.co_filename}:{line}"
