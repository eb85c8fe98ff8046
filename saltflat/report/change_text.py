"""How far a measure moved, in few letters."""

from __future__ import annotations

import math
import re
from itertools import count

from saltflat.report.change import UNDEFINED, UNMEASURED, Change


def format_change(change: Change, logarithmic: bool, brief: bool = False) -> str:
    """How far it moved: a part of itself where it stayed, else from which to which factor.

    Args:
        change: what the draws did.
        logarithmic: whether differences tell, not ratios.
        brief: only the factor that is farthest from 1, or the largest difference.
    """
    if change.verdict in (UNDEFINED, UNMEASURED):
        return ""
    if change.is_unchanged:
        return "exactly" if change.moved == 0 else f"within {format_short(change.moved, 1)}"
    if math.isnan(change.smallest):
        return "undefined"
    lost = ", or undefined" if any(value is not None and math.isnan(value) for value in change.values) else ""
    if not logarithmic and math.isinf(change.smallest):
        return "away from 0" + lost
    ends = list(dict.fromkeys([change.smallest, change.largest]))
    if brief:
        ends = [max(ends, key=abs if logarithmic else _compute_ratio_distance)]
    told = [format_short(end, 3, "+") if logarithmic else format_factor(end) for end in ends]
    return "x " * (not logarithmic) + " to ".join(dict.fromkeys(told)) + lost


def _compute_ratio_distance(ratio: float) -> float:
    """How far a ratio is from 1; what changed its sign or vanished is farthest."""
    return abs(math.log(ratio)) if ratio > 0 else math.inf


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
