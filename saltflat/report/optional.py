"""Packages that only some of the outputs need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from saltflat.errors import SaltflatError


class MissingPackageError(SaltflatError, ImportError):
    """A package that this output needs is not installed."""


def package(name: str, purpose: str) -> ModuleType:
    """The package or module, imported when it is first needed."""
    try:
        return import_module(name)
    except ImportError as problem:
        top = name.partition(".")[0]
        raise MissingPackageError(
            f"Got {purpose} without {top}, which cannot be imported ({problem}). Want {top}. Do: pip install {top}."
        ) from problem
