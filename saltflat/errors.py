"""Exceptions and warnings. Every message reads "Expected X, but got Y. Try Z."."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType


class SaltflatError(Exception):
    """Base class of the errors in a request. Nothing that belongs to the caller was changed."""

    def __str__(self) -> str:
        # Messages quote names from files and may reach a terminal.
        from saltflat.results.text import make_lines_printable  # at call time, since it imports this module

        return make_lines_printable(super().__str__())


class UnknownNameError(SaltflatError, LookupError):
    """Raised for a loss, statistic, layer or option that does not exist."""


class DataError(SaltflatError, ValueError):
    """Raised for data that cannot be measured on."""


class EmptyDataError(DataError):
    """Raised for data without examples."""


class OneShotDataError(DataError):
    """Raised for data that can be read only once, or that yields less the second time."""


class LabelError(DataError):
    """Raised for targets that do not fit the outputs and the loss."""


class NonFiniteError(SaltflatError, ValueError):
    """Raised for NaN or infinity in weights, inputs, outputs or loss."""


class NondeterministicError(SaltflatError, ValueError):
    """Raised for data or a model that differs between two passes."""


class ModelError(SaltflatError, ValueError):
    """Raised for a model that cannot be measured as it is."""


class CoupledExamplesError(ModelError):
    """Raised if one example's output depends on the other examples of its batch."""


class ParameterError(ModelError):
    """Raised if there are no parameters to measure, or parameters without curvature."""


class PrecisionError(ModelError):
    """Raised for a model whose dtype is too coarse for curvature."""


class DeviceError(SaltflatError, ValueError):
    """Raised for a device that cannot be used, or for a model and data on different devices."""


class OptionError(SaltflatError, ValueError):
    """Raised for an argument or option with an invalid value."""


class ProcessError(SaltflatError):
    """Raised if processes cannot measure together: one has ended, has failed, or makes other calls."""


class TrainingError(SaltflatError, RuntimeError):
    """Raised for training calls in an invalid order. No step was taken."""


class NotSmoothError(SaltflatError, ValueError):
    """Raised for a measure that has no gradient to train with."""


class ReportError(SaltflatError, ValueError):
    """Raised for a report that cannot be written, read or compared."""


class StudyError(SaltflatError, ValueError):
    """Raised for a study that cannot be run, or a folder that cannot hold it. Finished runs are kept."""


class CodeNotAllowedError(StudyError):
    """Raised for code named in a study's files that is not allowed to run. Nothing was imported."""


def format_error_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message.

    >>> format_error_line(RuntimeError("sizes differ\\nhere"))
    'RuntimeError: sizes differ'
    """
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _find_closest(name: str, names: Sequence[str]) -> str | None:
    """Return the name meant, most likely: the one whose initials or beginning it is, else a similar one, if any is.

    >>> _find_closest("ce", ["bce_with_logits", "cross_entropy", "mse"])
    'cross_entropy'
    """
    initials = [each for each in names if name == "".join(word[:1] for word in each.split("_")) and "_" in each]
    begun = [each for each in names if name and each.startswith(name)]
    similar = get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    return next(iter([*initials, *begun, *similar, *(names if len(names) == 1 else ())]), None)


def make_unknown_name_error(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that does not exist, which suggests the closest match, if one is close.

    >>> str(make_unknown_name_error("measure", "hessian_tract", ["rho", "hessian_trace"]))
    "Expected one of hessian_trace, rho, but got the measure 'hessian_tract'. Try 'hessian_trace'."
    """
    return make_unknown_names_error(kind, [name], known)


def make_unknown_names_error(kind: str, unknown: Sequence[object], known: Iterable[str]) -> UnknownNameError:
    """Return the error for names that do not exist, which suggests the closest match of each.

    >>> str(make_unknown_names_error("measure", ["rhoo", "kapa"], ["rho", "kappa"]))
    "Expected one of kappa, rho, but got the measures 'rhoo' and 'kapa'. Try 'rho' and 'kappa'."
    """
    different = dict.fromkeys(map(repr, unknown))
    names, kinds = sorted(known), f"{kind}s" if len(different) > 1 else kind
    got = " and ".join(different)
    if not names:
        return UnknownNameError(f"Expected no {kinds}, but got {got}. Try leaving it out.")
    listed = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    expected = f"one of {listed}" if len(names) > 1 else listed
    closest = [repr(each) for name in unknown if (each := _find_closest(str(name), names)) is not None]
    hint = " and ".join(dict.fromkeys(closest)) if closest else "one of these"
    return UnknownNameError(f"Expected {expected}, but got the {kinds} {got}. Try {hint}.")


class NotDefinedError(SaltflatError, ValueError):
    """Raised if a model, a loss or data does not have the requested quantity. The message is the reason."""


class MemoryLimitWarning(UserWarning):
    """Issued if a call will use more memory than ``memory=`` allows."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning at the line outside of the package that made the call."""
    own, frame, level = str(Path(__file__).parent), sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((own, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# Modules whose package on PyPI has another name.
INSTALLED_AS = {"yaml": "PyYAML", "torch.utils.tensorboard": "tensorboard"}


class MissingPackageError(SaltflatError, ImportError):
    """Raised if an optional package is not installed."""


def import_optional(name: str, purpose: str) -> ModuleType:
    """Import an optional package or module.

    Args:
        name: of the module.
        purpose: what needs it, for the error message.
    """
    try:
        return import_module(name)
    except ImportError as problem:
        top = name.partition(".")[0]
        wanted = INSTALLED_AS.get(name, INSTALLED_AS.get(top, top))
        raise MissingPackageError(
            f"Expected {wanted} to be installed for {purpose}, but got {type(problem).__name__}: {problem}. "
            f"Try pip install {wanted}."
        ) from problem
