"""Judge whether two readings of a measure differ by more than chance, and which network is flatter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from saltflat.results.jackknife import Jackknife
from saltflat.results.report import Reading
from saltflat.results.text import join_words

if TYPE_CHECKING:
    from saltflat.results.comparison import Contrast


DIFFERENT = "different"
SAME = "same"
WITHIN = "within errors"
UNJUDGED = "not judged"
UNDEFINED = "undefined"

# Relative differences below this are rounding, by precision.
ROUNDING = {"float64": 1e-9, "float32": 1e-4}
# In standard errors of a difference: 99 % of chance differences are smaller. A table judges many measures at once, and
# errors of heavy-tailed means are slightly underestimated.
WIDTH = 2.58


def judge_difference(
    first: Reading, other: Reading, sizes: Sequence[int] | None = None, rounding: float = ROUNDING["float64"]
) -> str:
    """Return the verdict on the difference of two readings.

    Args:
        first: one reading.
        other: the other reading.
        sizes: the sizes of the groups of examples, if both readings are of the same examples.
        rounding: relative differences below this are rounding.

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
    """Return the standard error of the difference, over examples and random draws; None where unknown.

    With ``sizes`` the readings are of the same examples: their common variation cancels, and the error is that of the
    differences with one group of examples left out at a time.
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
    """Return the other value minus the first."""
    return 0.0 if first.value == other.value else other.value - first.value


def compute_ratio(first: Reading, other: Reading) -> float:
    """Return the other value over the first; nan where the first is zero or both are infinite."""
    return other.value / first.value if first.value else math.nan


def find_flattest(
    readings: Mapping[str, Reading], smaller: str | None, judge: Callable[[str, str], str]
) -> tuple[str | None, bool]:
    """Return the label of the flattest, and whether its lead exceeds the errors.

    The label is None if the measure does not tell flat from sharp, if a value is undefined, or if another is as flat up
    to errors.

    Args:
        readings: by label.
        smaller: what a smaller value means, ``"flatter"`` or ``"sharper"``.
        judge: returns the verdict on the difference between two labels.
    """
    if smaller not in ("flatter", "sharper") or len(readings) < 2:
        return None, True
    best = (min if smaller == "flatter" else max)(readings, key=lambda label: readings[label].value)
    against = {judge(best, label) for label in readings if label != best}
    if against & {UNDEFINED, SAME, WITHIN}:
        return None, True
    if any(readings[best].value == reading.value for label, reading in readings.items() if label != best):
        return None, False
    return best, UNJUDGED not in against


HONEST = "that rescaling cannot fool"
# Variants would count a measure twice.
VARIANTS = (
    "normalized_sharpness_arxiv",
    "normalized_sharpness_printed",
    "parameterwise_normalized_sharpness",
    "regularized_normalized_sharpness",
)


def format_answer(contrasts: Iterable[Contrast]) -> str:
    """Return the joint verdict of the measures invariant to rescaling units: one vote each, without variants."""
    shared = [each for each in contrasts if len(each.readings) > 1]
    honest = [each for each in shared if "unit_scale" in each.invariant_to and each.name not in VARIANTS]
    judged = [each for each in honest if not set(each.verdicts.values()) & {UNJUDGED, UNDEFINED} and each.sure]
    if not shared:
        return "No measure is in more than one report: nothing to compare."
    if not honest:
        return "None of these measures is invariant to rescaling: no verdict. Measure with measures='invariant'."
    if not judged:
        return f"No verdict: the error of {_format_measure_count(honest, 'each of the')} is not known."
    if all(set(each.verdicts.values()) <= {SAME, WITHIN} for each in judged):
        return f"No difference beyond chance, by {_format_measure_count(judged, 'any of the')}."
    votes = Counter(each.flattest for each in judged if each.flattest is not None)
    silent = len(judged) - sum(votes.values())
    if not votes:
        return f"They differ beyond chance, but none is the flattest, by {_format_measure_count(judged, 'any of the')}."
    (best, count), *others = votes.most_common()
    if others:
        said = join_words([f"{label} by {number}" for label, number in votes.most_common()])
        rest = f"; {silent} {'do' if silent > 1 else 'does'} not tell" if silent else ""
        return f"The {len(judged)} measures {HONEST} disagree on which is flatter: {said}{rest}."
    if not silent:
        return f"{best} is flatter beyond chance, by {_format_measure_count(judged, 'all')}."
    rest = "the other does not tell" if silent == 1 else f"the other {silent} do not tell"
    some = f"{count} of the {len(judged)} measures {HONEST}"
    if 2 * count < len(judged):
        finds = "finds" if count == 1 else "find"
        return f"Little difference: {some} {finds} {best} flatter beyond chance; {rest}."
    return f"{best} is flatter beyond chance, by {some}; {rest}."


def _format_measure_count(contrasts: list[Contrast], quantifier: str) -> str:
    count = len(contrasts)
    return f"the only measure here {HONEST}" if count == 1 else f"{quantifier} {count} measures {HONEST}"
