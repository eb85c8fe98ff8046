"""Packages that only some of the outputs need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from saltflat.errors import SaltflatError

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
            f"Got {purpose} without {wanted}, which cannot be imported ({problem}). Want {wanted}. "
            f"Do: pip install {wanted}."
        ) from problem
