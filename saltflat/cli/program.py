"""The program that the commands belong to: its terminal, its errors, and names as they are typed."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperGroup

import saltflat
from saltflat.audit.result import Audit
from saltflat.errors import OptionError, SaltflatError, make_unknown_name_error
from saltflat.results.comparison import Comparison
from saltflat.results.files import check_writable_path, replace_atomically
from saltflat.results.report import Report
from saltflat.results.text import make_lines_printable, make_printable


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
            f"Expected a place for the results, but got a standard output that cannot be written ({error.strerror}). "
            "Try freeing the disk, or send them elsewhere."
        ) from error


def reword_message(text: str) -> str:
    """A message with options in place of arguments.

    Example:
        >>> reword_message("needs the parameters before training: pass initial=")
        'needs the parameters before training: pass --initial'
    """
    return text.replace("pass initial=", "pass --initial").replace("Try device='cpu'", "Try --device cpu")


def reword_report(report: Report) -> Report:
    """The same report, whose reasons name options."""
    readings = {
        name: replace(each, notes=tuple(map(reword_message, each.notes))) for name, each in report.readings.items()
    }
    left_out = {name: reword_message(why) for name, why in report.left_out.items()}
    return replace(report, readings=readings, left_out=left_out)


def reword_audit(audit: Audit) -> Audit:
    """The same for an audit."""
    report = reword_report(audit.report)
    lines = {name: replace(line, reading=report[name]) for name, line in audit.items()}
    return replace(audit, report=report, lines=lines)


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


DTYPES = {"float32": torch.float32, "float64": torch.float64}


def parse_names(given: list[str] | None) -> list[str] | None:
    """Names that came with commas, one by one, or both; commas inside of parentheses belong to the name.

    Example:
        >>> parse_names(["rho(axis='row', p=2),trace", "frobenius"])
        ["rho(axis='row', p=2)", 'trace', 'frobenius']
    """
    if not given:
        return None
    names, depth = [""], 0
    for letter in ",".join(given):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    names = [name.strip() for name in names if name.strip()]
    if depth != 0 or not names:
        raise OptionError(
            "Expected at least one, with as many closing as opening parentheses, but got the names "
            f"{', '.join(given)!r}. Try quoting names with options, \"rho(axis='row')\"."
        )
    return names


def parse_dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise make_unknown_name_error("dtype", name, DTYPES)
    return None if name is None else DTYPES[name]


PICTURES = ("png", "svg", "pdf")
PAGES = (".html", ".htm")


class SavableResult(Protocol):
    """A result that can be written and drawn."""

    def save(self, path: Path) -> Path: ...

    def plot(self) -> Any: ...


def check_outputs(out: Path | None, plot: Path | None, quiet: bool, html: Path | None = None) -> None:
    """Find out before the long work whether its results can be kept."""
    if quiet and out is None and plot is None and html is None:
        raise OptionError(
            "Expected a place for the results, but got --quiet without --out or --plot. Try --out report.json."
        )
    check_page_path(html)
    given = {"--out": out, "--plot": plot, "--html": html}
    places = [check_writable_path(path, option) for option, path in given.items() if path is not None]
    if plot is not None and get_picture_format(plot) not in PICTURES:
        raise OptionError(
            f"Expected a name that ends in {' or '.join(PICTURES)}, but got --plot {str(plot)!r}. Try figure.png."
        )
    if len(places) > len(set(places)):
        both = next(path for path in given.values() if path is not None and places.count(check_writable_path(path)) > 1)
        names = " and ".join(
            name
            for name, path in given.items()
            if path is not None and check_writable_path(path) == check_writable_path(both)
        )
        raise OptionError(f"Expected a file for each, but got {str(both)!r} for both {names}. Try --out report.json.")


def write_result(result: SavableResult, out: Path | None, plot: Path | None, quiet: bool) -> None:
    """Write and draw the result, and say so."""
    if out is not None:
        done = _choose_verb(out)
        result.save(out)
        if not quiet:
            print_message(f"{done} {out}.")
    if plot is not None:
        write_figure(result.plot(), plot, quiet)


def write_figure(figure: Any, plot: Path, quiet: bool = False) -> None:
    """Write a figure, in the format that the name says, and say so."""
    done = _choose_verb(plot)
    with replace_atomically(plot) as part:
        figure.savefig(part, format=get_picture_format(plot))
    if not quiet:
        print_message(f"{done} {plot}.")


def check_page_path(html: Path | None, option: str = "--html") -> None:
    """Find out before anything is shown whether a page can be written."""
    if html is None:
        return
    if html.suffix.lower() not in PAGES:
        raise OptionError(
            f"Expected a name that ends in {' or '.join(PAGES)}, but got {option} {str(html)!r}. Try page.html."
        )
    check_writable_path(html, option)


def write_result_page(result: Report | Comparison | Audit, html: Path | None, quiet: bool = False) -> None:
    """Write the result as a page for a browser, and say so."""
    if html is not None:
        from saltflat.render.html import render_audit_page, write_page  # needs packages that only pages do

        done = _choose_verb(html)
        _ = write_page(render_audit_page(result), html) if isinstance(result, Audit) else result.to_html(html)
        if not quiet:
            print_message(f"{done} {html}.")


def get_picture_format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def _choose_verb(path: Path) -> str:
    return "Replaced" if path.exists() else "Wrote"
