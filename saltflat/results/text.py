"""Format numbers, names, lists and formulas as plain text, and tables for a terminal of any width."""

from __future__ import annotations

import io
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from saltflat.results.json_codec import JsonValue


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with at most ``digits`` significant digits.

    Example:
        >>> format_number(1234.5678), format_number(0.1), format_number(float("nan"))
        ('1235', '0.1', 'undefined')
    """
    return "undefined" if math.isnan(value) else f"{value:.{digits}g}"


def format_quantity(value: float, stderr: float | None) -> str:
    """Format a number and its standard error, rounded to two digits of the error.

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
    """Return the text on one line, with control characters escaped.

    Example:
        >>> make_printable("conv\\x1b[2J")
        'conv\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def make_lines_printable(text: str) -> str:
    """Escape control characters in a text of several lines.

    Example:
        >>> make_lines_printable("one\\x1b[2J\\ntwo")
        'one\\\\x1b[2J\\ntwo'
    """
    return "\n".join(map(make_printable, text.split("\n")))


def fold_name(name: str, width: int) -> str:
    """Wrap a name to ``width``, preferably after dots, underscores and opening parentheses.

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
    """Join words as a sentence lists them.

    Example:
        >>> join_words(["rho", "trace", "kappa"])
        'rho, trace and kappa'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# A line under the header and nothing else, in ASCII, which every terminal and log file can show.
RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render_text(content: RenderableType, width: int | None = None) -> str:
    """Render rich content as plain text, for the width of the terminal, or 100 if there is none."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False
    )
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def build_ruled_table(label: str) -> Table:
    """Return an empty table whose first column holds names."""
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column(label, overflow="fold")
    return table


def add_number_column(table: Table, header: str) -> None:
    """Add a right-aligned column of numbers."""
    table.add_column(Text(header), justify="right", overflow="fold")


def can_fit(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Return whether the table fits the width without wrapping any cell."""
    return Measurement.get(console, options.update(max_width=100_000), table).maximum <= options.max_width


def format_short(value: float, digits: int = 2, sign: str = "") -> str:
    """Format a number in as few characters as possible.

    Example:
        >>> format_short(12345.0), format_short(123.0), format_short(2.4e-12, 1)
        ('1.2e4', '120', '2e-12')
    """
    if 10**digits <= abs(value) < 1e4:
        value, digits = float(f"{value:.{digits}g}"), 4
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{value:{sign}.{digits}g}")


def format_factor(value: float) -> str:
    """Format a ratio briefly, with enough digits that only 1 prints as 1.

    Example:
        >>> format_factor(1.00034), format_factor(0.99), format_factor(1.0)
        ('1.0003', '0.99', '1')
    """
    attempts = (format_short(value, digits) for digits in count(2))
    return next(each for each in attempts if value == 1 or float(each) != 1)


def format_power(decades: float) -> str:
    """Format ten to a power, which may exceed the largest float.

    Example:
        >>> format_power(3.0), format_power(400.5)
        ('1000', '3.2e400')
    """
    if decades < 300:
        return format_factor(10**decades)
    whole = math.floor(decades)
    return f"{10 ** (decades - whole):.2g}e{whole}"


def format_count(amount: int, what: str, plural: str = "") -> str:
    """Format a count with its noun, in the plural unless the count is 1.

    Example:
        >>> format_count(1, "draw"), format_count(3, "draw"), format_count(2, "entry", "entries")
        ('1 draw', '3 draws', '2 entries')
    """
    return f"{amount} {what if amount == 1 else plural or what + 's'}"


def format_setting(value: JsonValue) -> str:
    """Format a setting for people.

    Example:
        >>> format_setting((64, 32)), format_setting(None), format_setting(1e-3), format_setting(True)
        ('64, 32', 'none', '0.001', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, float):
        return format_number(value, 6)
    if isinstance(value, list | tuple):
        return ", ".join(map(format_setting, value))
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {format_setting(each)}" for key, each in value.items())
    return make_printable(str(value))


@dataclass(frozen=True)
class MathNode:
    """A part of a formula.

    Attributes:
        kind: what it is.
        text: of a symbol, its TeX: a character, or a command without the backslash.
        parts: the entries of a row; numerator and denominator; the radicand; or base, subscript and superscript, where
            a missing script is an empty row.
    """

    kind: Literal["symbol", "space", "row", "fraction", "root", "script"]
    text: str = ""
    parts: tuple[MathNode, ...] = ()


_TEX_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_MARKUP = re.compile(r":math:`([^`]*)`|``([^`]*)``|`([^`]*)`")
_FRACTIONS, _SPACES = ("frac", "tfrac", "dfrac"), (",", ";", ":", "!", " ", "quad", "qquad")
# Commands that change how their argument looks, not what it says.
_STYLES = ("mathrm", "mathbf", "mathcal", "mathbb", "text", "operatorname", "left", "right", "displaystyle")
EMPTY_ROW = MathNode("row")
# In a terminal; other commands are shown by their names.
_ASCII = {
    "Vert": "||", "lVert": "||", "rVert": "||", "lvert": "|", "rvert": "|", "le": "<=", "leq": "<=", "ge": ">=",
    "geq": ">=", "ne": "!=", "cdot": "*", "times": "*", "circ": "*", "pm": "+-", "langle": "<", "rangle": ">",
    "infty": "inf", "top": "T", "nabla": "grad", "ell": "l", "to": "->", "in": "in", "{": "{", "}": "}",
}  # fmt: skip


def parse_markup(text: str) -> list[tuple[Literal["text", "math", "code"], str]]:
    """Split a sentence of a docstring into plain text, formulas and code.

    Example:
        >>> parse_markup("Of :math:`w`, as ``rho`` has it.")
        [('text', 'Of '), ('math', 'w'), ('text', ', as '), ('code', 'rho'), ('text', ' has it.')]
    """
    found: list[tuple[Literal["text", "math", "code"], str]] = []
    end = 0
    for match in _MARKUP.finditer(text):
        found.append(("text", text[end : match.start()]))
        found.append(("code", match[2] or match[3] or "") if match[1] is None else ("math", match[1]))
        end = match.end()
    return [(kind, part) for kind, part in [*found, ("text", text[end:])] if part]


def strip_markup(text: str) -> str:
    """Return a sentence of a docstring as plain text on one line, with formulas in ASCII.

    Example:
        >>> print(strip_markup(r"Of :math:`\\frac1N \\sum_n \\|g_n\\|^4`, as ``rho`` has it."))
        Of 1/N sum_n ||g_n||^4, as rho has it.
    """
    parts = [format_math(part) if kind == "math" else part for kind, part in parse_markup(text)]
    return make_printable("".join(parts))


def format_math(tex: str) -> str:
    """Return a TeX formula as plain ASCII where possible.

    Example:
        >>> print(format_math(r"\\gamma = \\ln |I(w)|"), format_math(r"\\sqrt{x_i^{1/D}}"), sep="; ")
        gamma = ln |I(w)|; sqrt(x_i^(1/D))
    """
    try:
        return re.sub(r"\s+", " ", _format_node(parse_math(tex))).strip()
    except RecursionError:
        return tex


def parse_math(tex: str) -> MathNode:
    """Parse a TeX formula; unbalanced braces are ignored, and unknown commands become symbols."""
    tokens = _TEX_TOKEN.findall(tex)
    # Each with whether it is a command, the next one last.
    rest = [(each[1:], True) if len(each) > 1 and each[0] == "\\" else (each, False) for each in reversed(tokens)]
    parts: list[MathNode] = []
    while rest:
        parts += _parse_row(rest).parts
    return MathNode("row", parts=tuple(parts))


def _parse_row(rest: list[tuple[str, bool]]) -> MathNode:
    """Parse up to a closing brace; ``rest`` holds the tokens in reverse order."""
    parts: list[MathNode] = []
    while rest:
        token, command = rest[-1]
        if token == "}" and not command:
            rest.pop()
            break
        if token in "_^" and not command:
            rest.pop()
            while parts and parts[-1].kind == "space":
                parts.pop()
            base = parts.pop() if parts else EMPTY_ROW
            known = base.parts if base.kind == "script" else (base, EMPTY_ROW, EMPTY_ROW)
            script = _parse_argument(rest)
            scripts = (script, known[2]) if token == "_" else (known[1], script)
            parts.append(MathNode("script", parts=(known[0], *scripts)))
        else:
            parts.append(_parse_argument(rest, keep_space=True))
    return MathNode("row", parts=tuple(parts))


def _parse_argument(rest: list[tuple[str, bool]], keep_space: bool = False) -> MathNode:
    """Parse one symbol, group or command with its arguments."""
    if not rest:
        return EMPTY_ROW
    token, command = rest.pop()
    if token.isspace() or (command and token in _SPACES):
        return MathNode("space") if keep_space else _parse_argument(rest)
    if command and token in _FRACTIONS:
        return MathNode("fraction", parts=(_parse_argument(rest), _parse_argument(rest)))
    if command and token == "sqrt":
        return MathNode("root", parts=(_parse_argument(rest),))
    if command and token in _STYLES:
        return _parse_argument(rest)
    if token == "{" and not command:
        return _parse_row(rest)
    if token == "}" and not command:
        return EMPTY_ROW
    return MathNode("symbol", "Vert" if command and token == "|" else token)


def _format_node(node: MathNode) -> str:
    parts = [_format_node(each) for each in node.parts]
    if node.kind == "symbol":
        return _ASCII.get(node.text, node.text)
    if node.kind == "space":
        return " "
    if node.kind == "fraction":
        return "/".join(part if re.fullmatch(r"[\w^]+", part) else f"({part})" for part in parts)
    if node.kind == "root":
        return f"sqrt({parts[0]})"
    if node.kind == "script":
        marks = [mark + _parenthesize(part) for mark, part in zip("_^", parts[1:], strict=True) if part]
        return parts[0] + "".join(marks)
    # TeX separates words by backslashes, text by spaces.
    pairs = zip(["", *parts], parts, strict=False)
    return "".join(" " * (one[-1:].isalnum() and two[:1].isalnum() and len(one + two) > 2) + two for one, two in pairs)


def _parenthesize(text: str) -> str:
    return text if text.isalnum() else f"({text})"
