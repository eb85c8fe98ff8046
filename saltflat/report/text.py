"""Numbers and names as they are printed. Names and notes come from models and files: nothing in them is trusted."""

from __future__ import annotations

import math
import re


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
