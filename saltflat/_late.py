"""Import modules of later packages on first use.

The packages are ordered, and each imports only from those before it. Two things need later packages: results that
render themselves (``print``, ``plot``, ``to_html``), and lookups of names or axes that are defined later. Importing
them on first use avoids import cycles, and loads no plotting library before the first plot.
"""

from importlib import import_module
from types import ModuleType


def load_later(name: str) -> ModuleType:
    """Import a module of the package by its name within the package, such as ``"render.report"``."""
    return import_module(f"saltflat.{name}")
