"""What the person at the screen sees."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from saltflat.errors import OptionError
from saltflat.report.text import make_lines_printable, make_printable


def print_message(text: str, style: str = "dim") -> None:
    """A line to the person, beside the results."""
    Console(stderr=True).print(Text(make_printable(text), style=style), soft_wrap=True)


def print_result(thing: Any) -> None:
    """A result as a table: in colours and of the screen's width, or as it prints itself into files and pipes."""
    with catch_stdout_errors():
        if sys.stdout.isatty():
            Console().print(_EscapedRenderable(thing))
        else:
            typer.echo(make_lines_printable(str(thing)))


class _EscapedRenderable:
    """A result whose own text cannot steer the terminal; colours and layout come from rich."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.thing, options):
            yield Segment(make_lines_printable(text), style, control)


def open_missing_streams() -> None:
    """Send to nowhere what goes to a standard stream that was closed (``>&-``); Python has None for such streams."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def discard_output() -> None:
    """Send what is still to be printed to nowhere, or Python tries again at its end, and complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def catch_stdout_errors() -> Iterator[None]:
    """A full disk behind the standard output is an error like others."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # a reader that has seen enough
            raise
        with suppress(OSError):
            sys.stdout.close()  # else Python tries again at its end, and complains
        raise OptionError(
            f"Got a standard output that cannot be written ({error.strerror}). Want a place for the results. "
            "Do: free the disk, or send them elsewhere."
        ) from error
