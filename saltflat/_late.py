"""Modules of later stations, loaded at the first use.

The packages are stations in a row, and each imports only from those before it. Two things reach ahead: results that
draw themselves (``print``, ``plot``, ``to_html``), and names or axes that only a later station can look up. They load
what they need here, so that nothing is imported in a circle and no plotting library before a plot is asked for.
"""

from importlib import import_module
from types import ModuleType


def load_later(name: str) -> ModuleType:
    """Import a module of the package by its name within it, such as ``"render.report"``."""
    return import_module(f"saltflat.{name}")
