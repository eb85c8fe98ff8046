"""Whether two readings of one measure differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from saltflat.report.reading import Reading
from saltflat.sampling import Jackknife

DIFFERENT = "different"
SAME = "same"
WITHIN = "within errors"
UNJUDGED = "not judged"
UNDEFINED = "undefined"

# Numbers that differ by a smaller part of themselves are the same up to rounding, by the precision measured in.
ROUNDING = {"float64": 1e-9, "float32": 1e-4}
# Of the standard error of a difference: 99 % of those that chance makes are smaller. A table judges many measures at
# once, and errors of heavy-tailed means come out a little too small.
WIDTH = 2.58


def judge_difference(
    first: Reading, other: Reading, sizes: Sequence[int] | None = None, rounding: float = ROUNDING["float64"]
) -> str:
    """The verdict on the difference.

    Args:
        first: one reading.
        other: the other one.
        sizes: of the groups of examples, where both readings are of the same examples.
        rounding: differences below this part of the values are rounding.

    Example:
        >>> one = Reading("trace", 1.0, sampling_stderr=0.1)
        >>> others = Reading("trace", 1.2, sampling_stderr=0.1), Reading("trace", 2.0)
        >>> [judge_difference(one, other) for other in others]
        ['within errors', 'not judged']
    """
    if math.isnan(first.value) or math.isnan(other.value):
        return UNDEFINED
    gap = abs(compute_difference(first, other))
    slack = rounding * max(abs(first.value), abs(other.value)) if math.isfinite(gap) else 0.0
    if not first.converged or not other.converged:
        return UNJUDGED
    exact = first.exact and other.exact and first.stderr is None and other.stderr is None
    if exact and gap <= slack:
        return SAME
    error = compute_difference_error(first, other, sizes)
    if error is None:
        return UNJUDGED
    return DIFFERENT if gap > max(WIDTH * error, slack) else WITHIN


def compute_difference_error(first: Reading, other: Reading, sizes: Sequence[int] | None = None) -> float | None:
    """The standard error of the difference, over examples and random draws; None where it is not known.

    With ``sizes`` the readings are of the same examples: what the choice of the examples does to both cancels, and the
    error is that of the differences with one group of them left out at a time.
    """
    draws = [each.stderr for each in (first, other) if each.stderr is not None]
    if sizes and len(first.without_group) == len(other.without_group) == len(sizes):
        apart = [b - a for a, b in zip(first.without_group, other.without_group, strict=True)]
        sampling = Jackknife(other.value - first.value, apart, sizes).stderr
    elif first.sampling_stderr is None or other.sampling_stderr is None:
        return None
    else:
        sampling = math.hypot(first.sampling_stderr, other.sampling_stderr)
    # Random draws for different networks are independent: variances add.
    error = math.hypot(sampling, *draws)
    return None if math.isnan(error) else error


def compute_difference(first: Reading, other: Reading) -> float:
    """How much the other exceeds the first."""
    return 0.0 if first.value == other.value else other.value - first.value


def compute_ratio(first: Reading, other: Reading) -> float:
    """How many times the first the other is; nan where the first is zero or both are infinite."""
    return other.value / first.value if first.value else math.nan


def find_flattest(
    readings: Mapping[str, Reading], smaller: object, judged: Callable[[str, str], str]
) -> tuple[str | None, bool]:
    """The label of the flattest, and whether its lead exceeds the errors.

    None where the measure does not tell flat from sharp, where a value is undefined, or where another is as flat up to
    errors.

    Args:
        readings: by label.
        smaller: what a smaller value means, ``"flatter"`` or ``"sharper"``.
        judged: the verdict on the difference between two labels.
    """
    if smaller not in ("flatter", "sharper") or len(readings) < 2:
        return None, True
    best = (min if smaller == "flatter" else max)(readings, key=lambda label: readings[label].value)
    against = {judged(best, label) for label in readings if label != best}
    if against & {UNDEFINED, SAME, WITHIN}:
        return None, True
    if any(readings[best].value == reading.value for label, reading in readings.items() if label != best):
        return None, False
    return best, UNJUDGED not in against
