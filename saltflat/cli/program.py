"""The program that the commands belong to, and how it fails."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import saltflat
from saltflat.cli.screen import print_message
from saltflat.cli.wording import reword_message
from saltflat.errors import SaltflatError
from saltflat.report.text import make_lines_printable


class CommandGroup(TyperGroup):
    """Bad input is one line and exit code 2; what nobody foresaw keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SaltflatError as error:
            print_message(reword_message(" ".join(str(error).split())), "red")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as stop:
            print_message("Interrupted.", "red")
            raise typer.Exit(130) from stop


app = typer.Typer(
    cls=CommandGroup,
    help="How flat is a trained network's minimum, measured so that rescaling its weights cannot fool you?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"saltflat {saltflat.__version__}")
        raise typer.Exit


@app.callback()
def start(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How flat is a trained network's minimum, measured so that rescaling its weights cannot fool you?"""


@contextmanager
def open_cli_session(show_traceback: bool, modules_here: bool = True) -> Iterator[None]:
    """Modules in this folder can be imported, as with ``python -m``; errors are told in full first, where wanted.

    Args:
        show_traceback: whether they are.
        modules_here: False where no code of the user's runs: what our own packages import late must not come from
            this folder, which may be somebody else's.
    """
    folder = str(Path.cwd())
    if modules_here:
        sys.path.insert(0, folder)
    try:
        yield
    except SaltflatError:
        if show_traceback:
            typer.echo(make_lines_printable(traceback.format_exc()), err=True, nl=False)
        raise
    finally:
        if modules_here:
            sys.path.remove(folder)
