"""A mixin for results that print as text, in a rich console and in a notebook."""

from __future__ import annotations

from html import escape
from typing import ClassVar

from rich.console import RenderableType

from saltflat._late import load_later
from saltflat.results.text import render_text


class Displayable:
    """A result that a module of :mod:`saltflat.render` renders; the module is imported on first use.

    Attributes:
        renderer: the module, its class or function that returns a rich renderable, and the function that returns HTML,
            which may be empty.
    """

    renderer: ClassVar[tuple[str, str, str]]

    def __str__(self) -> str:
        return render_text(self.__rich__())

    def __rich__(self) -> RenderableType:
        module, table, _ = self.renderer
        found: RenderableType = getattr(load_later(f"render.{module}"), table)(self)
        return found

    def _repr_html_(self) -> str:
        module, _, html = self.renderer
        return str(getattr(load_later(f"render.{module}"), html)(self)) if html else f"<pre>{escape(str(self))}</pre>"
