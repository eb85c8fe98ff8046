"""Format numbers, names and lists of words for people, and tables for a terminal of any width."""

from __future__ import annotations

import io
import math
import re
import shutil
from itertools import count

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def format_number(value: float, digits: int = 4) -> str:
    """A number with so many significant digits.

    Example:
        >>> format_number(1234.5678), format_number(0.1), format_number(float("nan"))
        ('1235', '0.1', 'undefined')
    """
    return "undefined" if math.isnan(value) else f"{value:.{digits}g}"


def format_quantity(value: float, stderr: float | None) -> str:
    """A number and its standard error, to two digits of the error.

    Example:
        >>> format_quantity(12.3456, 0.0213), format_quantity(7921.6, 158.0), format_quantity(2.0, None)
        ('12.346 +- 0.021', '7920 +- 160', '2')
    """
    if stderr is None or math.isnan(value):
        return format_number(value)
    known = math.isfinite(value) and math.isfinite(stderr) and stderr > 0
    places = 1 - math.floor(math.log10(stderr)) if known else 0
    if not known or not -4 <= places <= 6 or abs(value) >= 1e7:
        return f"{format_number(value)} +- {format_number(stderr, 2)}"
    shown = max(places, 0)
    return f"{round(value, places):.{shown}f} +- {round(stderr, places):.{shown}f}"


def make_printable(text: str) -> str:
    """The text on one line, with everything that could steer a terminal spelt out.

    Example:
        >>> make_printable("conv\\x1b[2J")
        'conv\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def make_lines_printable(text: str) -> str:
    """The same for a text of several lines, which stay.

    Example:
        >>> make_lines_printable("one\\x1b[2J\\ntwo")
        'one\\\\x1b[2J\\ntwo'
    """
    return "\n".join(map(make_printable, text.split("\n")))


def fold_name(name: str, width: int) -> str:
    """A name over several lines, broken after dots, underscores and brackets where that fits.

    Example:
        >>> fold_name("features.block.conv.weight", 14).split("\\n")
        ['features.', 'block.conv.', 'weight']
    """
    lines = [""]
    for piece in re.findall(r"[^._(]*[._(]?", make_printable(name)):
        if len(lines[-1]) + len(piece) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(lines)


def join_words(words: list[str]) -> str:
    """Words as a sentence lists them.

    Example:
        >>> join_words(["rho", "trace", "kappa"])
        'rho, trace and kappa'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# A line under the header and nothing else, in characters that every terminal and every log file can hold.
RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render_text(content: RenderableType, width: int | None = None) -> str:
    """As text, for the terminal's width; 100 where there is no terminal."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False
    )
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def build_ruled_table(label: str) -> Table:
    """An empty table whose first column has names."""
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column(label, overflow="fold")
    return table


def add_number_column(table: Table, header: str) -> None:
    """A column of numbers."""
    table.add_column(Text(header), justify="right", overflow="fold")


def can_fit(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Whether nothing in it must be folded."""
    return Measurement.get(console, options.update(max_width=100_000), table).maximum <= options.max_width


def format_short(value: float, digits: int = 2, sign: str = "") -> str:
    """A number in as few letters as can be.

    Example:
        >>> format_short(12345.0), format_short(123.0), format_short(2.4e-12, 1)
        ('1.2e4', '120', '2e-12')
    """
    if 10**digits <= abs(value) < 1e4:
        value, digits = float(f"{value:.{digits}g}"), 4
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{value:{sign}.{digits}g}")


def format_factor(value: float) -> str:
    """The same for a ratio: what is not 1 is not printed as 1.

    Example:
        >>> format_factor(1.00034), format_factor(0.99), format_factor(1.0)
        ('1.0003', '0.99', '1')
    """
    told = (format_short(value, digits) for digits in count(2))
    return next(each for each in told if value == 1 or float(each) != 1)


def format_power(decades: float) -> str:
    """Ten to a power, which may be beyond all floating point numbers.

    Example:
        >>> format_power(3.0), format_power(400.5)
        ('1000', '3.2e400')
    """
    if decades < 300:
        return format_factor(10**decades)
    whole = math.floor(decades)
    return f"{10 ** (decades - whole):.2g}e{whole}"


def format_count(amount: int, what: str) -> str:
    """A number of things.

    Example:
        >>> format_count(1, "draw"), format_count(3, "draw")
        ('1 draw', '3 draws')
    """
    return f"{amount} {what}{'s' * (amount != 1)}"
