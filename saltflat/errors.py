"""What can be wrong with a request. Every message says what was got, what is wanted and what to do."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType


class SaltflatError(Exception):
    """Any problem with what the user asked for; nothing of the user's was changed."""

    def __str__(self) -> str:
        # Messages quote names from files, and end up on a terminal.
        from saltflat.results.text import make_lines_printable  # at call time: reports need this module

        return make_lines_printable(super().__str__())


class UnknownNameError(SaltflatError, LookupError):
    """A loss, statistic, layer or option that does not exist."""


class DataError(SaltflatError, ValueError):
    """The data cannot be measured on."""


class EmptyDataError(DataError):
    """No examples."""


class OneShotDataError(DataError):
    """The data can be read only once, or gave less the second time."""


class LabelError(DataError):
    """Targets that do not fit the outputs and the loss."""


class NonFiniteError(SaltflatError, ValueError):
    """NaN or infinity in weights, inputs, outputs or loss."""


class NondeterministicError(SaltflatError, ValueError):
    """Data or model that answers differently when asked twice."""


class ModelError(SaltflatError, ValueError):
    """The model cannot be measured as it is."""


class CoupledExamplesError(ModelError):
    """One example's output depends on the other examples of its batch."""


class ParameterError(ModelError):
    """No parameters to measure, or parameters of a kind that has no curvature."""


class PrecisionError(ModelError):
    """The model's numbers are too coarse for curvature."""


class DeviceError(SaltflatError, ValueError):
    """Model and data live on different devices."""


class OptionError(SaltflatError, ValueError):
    """An option with a value that means nothing."""


class TrainingError(SaltflatError, RuntimeError):
    """Training calls that do not fit together: nothing was stepped."""


class NotSmoothError(SaltflatError, ValueError):
    """A measure that has no gradient to train with."""


class ReportError(SaltflatError, ValueError):
    """A report that cannot be written, read or compared."""


class StudyError(SaltflatError, ValueError):
    """A study that cannot be run as it is asked for, or a folder that cannot hold it; what was finished is kept."""


class CodeNotAllowedError(StudyError):
    """Code that a study's files name, and that nobody has allowed to run; nothing was imported."""


def format_error_line(error: BaseException) -> str:
    """What an error of someone else's says, in one line.

    >>> format_error_line(RuntimeError("sizes differ\\nhere"))
    'RuntimeError: sizes differ'
    """
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def make_unknown_name_error(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that does not exist, with the nearest that do."""
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    advice = f"use {near[0]!r}" if near else "choose one of these"
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    return UnknownNameError(
        f"Expected one of, but got the {kind} {name!r}, which does not exist. {shown}. Try {advice}."
    )


class MemoryLimitWarning(UserWarning):
    """A call will take more memory than ``memory=`` says."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn of a call, at the line outside of the package that made it."""
    own, frame, level = str(Path(__file__).parent), sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((own, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# Modules that come with a package of another name.
INSTALLED_AS = {"yaml": "PyYAML", "torch.utils.tensorboard": "tensorboard"}


class MissingPackageError(SaltflatError, ImportError):
    """A package that this output needs is not installed."""


def import_optional(name: str, purpose: str) -> ModuleType:
    """The package or module, imported when it is first needed."""
    try:
        return import_module(name)
    except ImportError as problem:
        top = name.partition(".")[0]
        wanted = INSTALLED_AS.get(name, INSTALLED_AS.get(top, top))
        raise MissingPackageError(
            f"Expected {wanted}, but got {purpose} without {wanted}, which cannot be imported ({problem}). Try pip "
            f"install {wanted}."
        ) from problem
