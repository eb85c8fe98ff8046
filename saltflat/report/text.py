"""Numbers and names as they are printed. Names and notes come from models and files: nothing in them is trusted."""

from __future__ import annotations

import math
import re


def number(value: float, digits: int = 4) -> str:
    """A number with so many significant digits.

    Example:
        >>> number(1234.5678), number(0.1), number(float("nan"))
        ('1235', '0.1', 'undefined')
    """
    return "undefined" if math.isnan(value) else f"{value:.{digits}g}"


def quantity(value: float, stderr: float | None) -> str:
    """A number and its standard error, to two digits of the error.

    Example:
        >>> quantity(12.3456, 0.0213), quantity(7921.6, 158.0), quantity(2.0, None)
        ('12.346 +- 0.021', '7920 +- 160', '2')
    """
    if stderr is None or math.isnan(value):
        return number(value)
    known = math.isfinite(value) and math.isfinite(stderr) and stderr > 0
    places = 1 - math.floor(math.log10(stderr)) if known else 0
    if not known or not -4 <= places <= 6 or abs(value) >= 1e7:
        return f"{number(value)} +- {number(stderr, 2)}"
    shown = max(places, 0)
    return f"{round(value, places):.{shown}f} +- {round(stderr, places):.{shown}f}"


def printable(text: str) -> str:
    """The text on one line, with everything that could steer a terminal spelt out.

    Example:
        >>> printable("conv\\x1b[2J")
        'conv\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which stay.

    Example:
        >>> printable_lines("one\\x1b[2J\\ntwo")
        'one\\\\x1b[2J\\ntwo'
    """
    return "\n".join(map(printable, text.split("\n")))


def folded(name: str, width: int) -> str:
    """A name over several lines, broken after dots, underscores and brackets where that fits.

    Example:
        >>> folded("features.block.conv.weight", 14).split("\\n")
        ['features.', 'block.conv.', 'weight']
    """
    lines = [""]
    for piece in re.findall(r"[^._(]*[._(]?", printable(name)):
        if len(lines[-1]) + len(piece) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(lines)


def listed(words: list[str]) -> str:
    """Words as a sentence lists them.

    Example:
        >>> listed(["rho", "trace", "kappa"])
        'rho, trace and kappa'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
