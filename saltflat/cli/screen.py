"""What the person at the screen sees."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from saltflat.errors import OptionError


def say(text: str, style: str = "dim") -> None:
    """A line to the person, beside the results."""
    Console(stderr=True).print(Text(text, style=style), soft_wrap=True)


def show_on_screen(thing: Any) -> None:
    """A result as a table: in colours and of the screen's width, or as it prints itself into files and pipes."""
    with stdout_checked():
        if sys.stdout.isatty():
            Console().print(thing)
        else:
            typer.echo(str(thing))


@contextmanager
def stdout_checked() -> Iterator[None]:
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
