"""The program: commands, terminal, errors and files. Functions import the library: help is printed without torch."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

import saltflat
from saltflat._startup import raise_on_interrupt
from saltflat.errors import OptionError, SaltflatError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from saltflat.audit.result import Audit
    from saltflat.bounds.bound import Bound
    from saltflat.results.comparison import Comparison
    from saltflat.results.files import JsonFile
    from saltflat.results.plan import MeasurementPlan
    from saltflat.results.report import Report


HasReasons = TypeVar("HasReasons", "Report", "MeasurementPlan")


def print_message(text: str, style: str = "dim") -> None:
    """Print a line for the user to the standard error."""
    from saltflat.results.text import make_printable

    Console(stderr=True).print(Text(make_printable(text), style=style), soft_wrap=True)


def print_result(result: RenderableType) -> None:
    """Print a result: in color and as wide as a terminal, or as its plain text to files and pipes."""
    from saltflat.results.text import make_lines_printable

    with catch_stdout_errors():
        if sys.stdout.isatty():
            Console().print(_EscapedRenderable(result))
        else:
            typer.echo(make_lines_printable(str(result)))


class _EscapedRenderable:
    """A result whose own text cannot steer the terminal; colors and layout come from rich."""

    def __init__(self, result: RenderableType) -> None:
        self.result = result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from saltflat.results.text import make_lines_printable

        for text, style, control in console.render(self.result, options):
            yield Segment(make_lines_printable(text), style, control)


def open_missing_streams() -> None:
    """Replace standard streams that were closed (``>&-``), for which Python has None, by the null device."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def discard_output() -> None:
    """Send buffered output to the null device, since Python flushes it at exit and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def catch_stdout_errors() -> Iterator[None]:
    """Turn a failed write to the standard output, such as on a full disk, into an error of the library."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of a pipe has left
            raise
        with suppress(OSError):
            sys.stdout.close()  # else Python flushes it at exit and fails again
        raise OptionError(
            f"Expected a standard output that can be written, but got {error.strerror}. Try freeing the disk, or "
            "redirecting the output elsewhere."
        ) from error


def reword_message(text: str) -> str:
    """Return a message that names options in place of arguments.

    Example:
        >>> reword_message("needs the parameters before training: pass initial=")
        'needs the parameters before training: pass --initial'
    """
    text = text.replace("pass initial=", "pass --initial").replace("Try device='cpu'", "Try --device cpu")
    return text.replace("passing dtype=torch.float32", "--dtype float32")


def reword_report(report: Report) -> Report:
    """Return the report with notes and reasons that name options."""
    readings = {
        name: dataclasses.replace(each, notes=tuple(map(reword_message, each.notes)))
        for name, each in report.readings.items()
    }
    return dataclasses.replace(reword_reasons(report), readings=readings)


def reword_reasons(result: HasReasons) -> HasReasons:
    """Return the result with reasons that name options."""
    return dataclasses.replace(result, left_out={name: reword_message(why) for name, why in result.left_out.items()})


def reword_audit(audit: Audit) -> Audit:
    """Return the audit with notes and reasons that name options."""
    report = reword_report(audit.report)
    lines = {name: dataclasses.replace(line, reading=report[name]) for name, line in audit.items()}
    return dataclasses.replace(audit, report=report, lines=lines)


class CommandGroup(TyperGroup):
    """A group whose commands report bad input in one line, with exit code 2. Bugs keep their traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # its base class is private
        """Run the command that was chosen."""
        try:
            return super().invoke(ctx)
        except SaltflatError as error:
            print_message(reword_message(" ".join(str(error).split())), "red")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as stop:
            print_message("Interrupted.", "red")
            raise typer.Exit(130) from stop


class LibraryCommand(TyperCommand):
    """A command that imports the library before it runs, and not for its help."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # its base class is private
        """Run the command."""
        # Torch and SciPy turn a KeyboardInterrupt during their import into other errors: Ctrl-C raises it afterwards.
        import_module("saltflat.measures")
        with raise_on_interrupt():
            return super().invoke(ctx)


app = typer.Typer(
    cls=CommandGroup,
    help="Measure how flat a trained network's minimum is, with measures that rescaling its weights cannot fool.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def add_command(program: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function a command of the program.

    Parameters that are dataclasses become one option for each of their fields, so that commands can share options; the
    help prints them under the dataclass's ``heading``. The docstring is the help, with the lines of each paragraph
    joined.

    Args:
        program: that the command belongs to.
        name: of the command; that of the function by default.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        program.command(name, cls=LibraryCommand, help=text)(flatten_options(function))
        return function

    return register


def flatten_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of keyword arguments, with the fields of dataclasses in place of the dataclasses.

    Example:
        >>> @dataclasses.dataclass
        ... class Size:
        ...     width: int
        ...     height: int = 1
        >>> def show(size: Size, unit: str = "cm") -> None:
        ...     print(size.width * size.height, unit)
        >>> inspect.signature(flatten_options(show))
        <Signature (*, width: int, height: int = 1, unit: str = 'cm')>
        >>> flatten_options(show)(width=2, height=3, unit="m")
        6 m
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            kind = _put_under_heading(types[field.name], getattr(group, "heading", None))
            parameters.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            )

    @wraps(function)
    def call(**options: Any) -> None:
        made = {
            name: group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        function(**made, **options)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _put_under_heading(annotation: Any, heading: str | None) -> Any:
    """Return the annotation of an option that the help prints under this heading."""
    if heading is None:
        return annotation
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = heading
    return Annotated[kind, option]


def print_version(wanted: bool) -> None:
    """Print the version and exit, if that is wanted."""
    if wanted:
        typer.echo(f"saltflat {saltflat.__version__}")
        raise typer.Exit


@app.callback()
def start(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Measure how flat a trained network's minimum is, with measures that rescaling its weights cannot fool."""


@contextmanager
def open_cli_session(show_traceback: bool, modules_here: bool = True) -> Iterator[None]:
    """Make modules in the current folder importable, as with ``python -m``, and print tracebacks if wanted.

    Args:
        show_traceback: whether to print the traceback of an error.
        modules_here: False if no code of the user's runs. What the library imports later must then not come from the
            current folder, which may be someone else's.
    """
    from saltflat.results.text import make_lines_printable

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


def parse_names(given: list[str] | None) -> list[str] | None:
    """Return names that are separated by commas, given one by one, or both; not split inside of parentheses.

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
            f"Expected at least one name, with balanced parentheses, but got {', '.join(given)!r}. Try quoting names "
            "with options, \"rho(axis='row')\"."
        )
    return names


PICTURE_FORMATS = ("png", "svg", "pdf")
PAGE_SUFFIXES = (".html", ".htm")


def check_outputs(out: Path | None, plot: Path | None, quiet: bool, html: Path | None = None) -> None:
    """Check before the work starts that its results can be written."""
    from saltflat.results.files import check_writable_path

    if quiet and out is None and plot is None and html is None:
        raise OptionError(
            "Expected a file for the results, but got --quiet without --out or --plot. Try --out report.json."
        )
    check_page_path(html)
    given = {"--out": out, "--plot": plot, "--html": html}
    places = {option: check_writable_path(path, option) for option, path in given.items() if path is not None}
    check_picture_path(plot)
    for option, place in places.items():
        same = [other for other in places if places[other] == place]
        if len(same) > 1:
            raise OptionError(
                f"Expected a file for each, but got {str(given[option])!r} for both {' and '.join(same)}. "
                "Try --out report.json."
            )


def check_picture_path(plot: Path | None, option: str = "--plot") -> None:
    """Check before the work starts that a figure can be written."""
    from saltflat.results.files import check_writable_path

    if plot is None:
        return
    check_writable_path(plot, option)
    if get_picture_format(plot) not in PICTURE_FORMATS:
        formats = " or ".join(PICTURE_FORMATS)
        raise OptionError(f"Expected a name that ends in {formats}, but got {option} {str(plot)!r}. Try figure.png.")


def write_result(result: JsonFile, out: Path | None, quiet: bool) -> None:
    """Write the result, and print where."""
    if out is not None:
        done = choose_verb(out)
        result.save(out)
        if not quiet:
            print_message(f"{done} {out}.")


def write_figure(figure: Figure, plot: Path, quiet: bool = False) -> None:
    """Write a figure in the format of the file's suffix, and print where."""
    from saltflat.results.files import replace_atomically

    done = choose_verb(plot)
    with replace_atomically(plot) as part:
        figure.savefig(part, format=get_picture_format(plot))
    if not quiet:
        print_message(f"{done} {plot}.")


def check_page_path(html: Path | None, option: str = "--html") -> None:
    """Check before the work starts that a page can be written."""
    from saltflat.results.files import check_writable_path

    if html is None:
        return
    if html.suffix.lower() not in PAGE_SUFFIXES:
        raise OptionError(
            f"Expected a name that ends in {' or '.join(PAGE_SUFFIXES)}, but got {option} {str(html)!r}. Try page.html."
        )
    check_writable_path(html, option)


def write_result_page(result: Report | Comparison | Audit | Bound, html: Path | None, quiet: bool = False) -> None:
    """Write the result as a page for a browser, and print where."""
    if html is not None:
        from saltflat.audit.result import Audit
        from saltflat.render.html import render_audit_page, write_page

        done = choose_verb(html)
        _ = write_page(render_audit_page(result), html) if isinstance(result, Audit) else result.to_html(html)
        if not quiet:
            print_message(f"{done} {html}.")


def get_picture_format(path: Path) -> str:
    """Return the suffix of a file, in lower case and without the dot."""
    return path.suffix.removeprefix(".").lower()


def choose_verb(path: Path) -> str:
    """Return what writing this file does: replace one, or write a new one."""
    return "Replaced" if path.exists() else "Wrote"
