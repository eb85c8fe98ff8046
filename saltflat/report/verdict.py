"""Whether two readings of one measure differ by more than they are uncertain."""

from __future__ import annotations

import math

from saltflat.report.reading import Reading

DIFFERENT = "different"
SAME = "same"
WITHIN = "within errors"
UNJUDGED = "not judged"
UNDEFINED = "undefined"

# Numbers without error that differ by a smaller part of themselves are the same up to rounding.
ROUNDING = 1e-9


def judged(first: Reading, other: Reading) -> str:
    """The verdict on the difference.

    Example:
        >>> judged(Reading("trace", 1.0, stderr=0.1), Reading("trace", 1.2, stderr=0.1))
        'within errors'
        >>> judged(Reading("trace", 1.0), Reading("trace", 1.2))
        'different'
    """
    if math.isnan(first.value) or math.isnan(other.value):
        return UNDEFINED
    gap = abs(difference(first, other))
    slack = ROUNDING * max(abs(first.value), abs(other.value)) if math.isfinite(gap) else 0.0
    unsure = [each for each in (first, other) if not each.converged or not (each.exact or each.stderr is not None)]
    errors = [each.stderr for each in (first, other) if each.stderr is not None]
    if unsure or any(math.isnan(error) for error in errors):
        return UNJUDGED
    if errors:
        # Random signs of different seeds and networks are independent: variances add.
        return DIFFERENT if gap > max(1.96 * math.hypot(*errors), slack) else WITHIN
    return DIFFERENT if gap > slack else SAME


def difference(first: Reading, other: Reading) -> float:
    """How much the other exceeds the first."""
    return 0.0 if first.value == other.value else other.value - first.value


def ratio(first: Reading, other: Reading) -> float:
    """How many times the first the other is; nan where the first is zero or both are infinite."""
    return other.value / first.value if first.value else math.nan


def flattest(readings: dict[str, Reading], smaller: object) -> tuple[str | None, bool]:
    """The label of the flattest, and whether its lead exceeds the errors.

    None where the measure does not tell flat from sharp, where a value is undefined, or where another is as flat up to
    errors.

    Args:
        readings: by label.
        smaller: what a smaller value means, ``"flatter"`` or ``"sharper"``.
    """
    if smaller not in ("flatter", "sharper") or len(readings) < 2:
        return None, True
    best = (min if smaller == "flatter" else max)(readings, key=lambda label: readings[label].value)
    against = {judged(readings[best], reading) for label, reading in readings.items() if label != best}
    if against & {UNDEFINED, SAME, WITHIN}:
        return None, True
    if any(readings[best].value == reading.value for label, reading in readings.items() if label != best):
        return None, False
    return best, UNJUDGED not in against
