"""How far a measure moved when the weights were rescaled, and whether it had claimed to stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from saltflat.report.reading import Reading

STAYS = "stays, as claimed"
MOVES = "moves, as expected"
BROKEN = "MOVES, though claimed to stay"
UNCLAIMED = "stays, though not claimed"
WITHIN = "moves, within its errors"
UNDEFINED = "not defined"
UNMEASURED = "no draw was measured"
# What can be said of a measure that claims to stay, and of one that does not.
VERDICTS = {True: (STAYS, BROKEN, WITHIN, UNDEFINED, UNMEASURED), False: (MOVES, UNCLAIMED, UNDEFINED, UNMEASURED)}

# The largest part of itself by which a number may move and still be called the same.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Change:
    """One measure under the draws of one kind of rescaling.

    Attributes:
        claimed: whether the measure claims to stay.
        values: the measure after each draw; nan where it was not defined, None where the draw failed.
        smallest: the smallest ratio of a value to the one before; for logarithms the smallest difference.
        largest: the largest of them.
        moved: the largest change as a part of the value before; for logarithms the largest difference. Infinite where
            a value appears, disappears or leaves zero.
        verdict: whether it stayed, and whether that is what it claims.
        converged: False where a solver stopped early before or after some draw.
    """

    claimed: bool
    values: tuple[float | None, ...]
    smallest: float
    largest: float
    moved: float
    verdict: str
    converged: bool

    @property
    def is_unchanged(self) -> bool:
        return self.verdict in (STAYS, UNCLAIMED)


def compute_change(
    before: Reading, after: Sequence[Reading | None], claimed: bool, logarithmic: bool, tolerance: float = TOLERANCE
) -> Change:
    """What the draws did to a reading.

    Args:
        before: of the network as it is.
        after: of every draw; None for draws that could not be measured.
        claimed: whether the measure claims to stay.
        logarithmic: whether differences tell, not ratios.
        tolerance: the largest change that counts as none.

    Example:
        >>> compute_change(Reading("trace", 2.0), [Reading("trace", 8.0), Reading("trace", 1.0)], False, False).verdict
        'moves, as expected'
    """
    measured = [each for each in after if each is not None]
    values = [each.value for each in measured]
    steps = [step for value in values if not math.isnan(step := compute_step(before.value, value, logarithmic))]
    moved = [each for each in measured if not _is_same_value(before.value, each.value, logarithmic, tolerance)]
    if not measured:
        verdict = UNMEASURED
    elif math.isnan(before.value) and not moved:
        verdict = UNDEFINED
    elif not moved:
        verdict = STAYS if claimed else UNCLAIMED
    elif not claimed:
        verdict = MOVES
    else:
        verdict = WITHIN if all(_is_within_errors(before, each) for each in moved) else BROKEN
    return Change(
        claimed,
        tuple(None if each is None else each.value for each in after),
        min(steps, default=math.nan),
        max(steps, default=math.nan),
        max((_compute_relative_change(before.value, value, logarithmic) for value in values), default=math.nan),
        verdict,
        all(each.converged for each in [before, *measured]),
    )


def compute_step(old: float, new: float, logarithmic: bool) -> float:
    """From the value before to the value after: a ratio, or the difference of logarithms; nan where one is not defined.

    Example:
        >>> compute_step(2.0, 8.0, logarithmic=False), compute_step(2.0, 8.0, logarithmic=True)
        (4.0, 6.0)
    """
    if logarithmic:
        return 0.0 if old == new else new - old
    if old == new:
        return 1.0
    return new / old if old else math.copysign(math.inf, new)


def compute_decades(old: float, new: float, logarithmic: bool) -> float:
    """By how many powers of ten a measure was multiplied; nan where no ratio tells, infinite from or to 0.

    Logarithmic measures count the powers of what they are the logarithm of.

    Example:
        >>> compute_decades(2.0, 200.0, logarithmic=False), compute_decades(1e200, 1e-200, logarithmic=False)
        (2.0, -400.0)
    """
    step = compute_step(old, new, logarithmic)
    if logarithmic:
        return step / math.log(10)
    if math.isfinite(old) and math.isfinite(new) and old * math.copysign(1.0, new) > 0 and new:
        # Ratios of numbers that differ by more than the largest number are themselves none.
        return math.log10(step) if 1e-300 < step < 1e300 else math.log10(abs(new)) - math.log10(abs(old))
    return math.nan if math.isnan(step) or step < 0 else math.log10(step) if step else -math.inf


def _compute_relative_change(old: float, new: float, logarithmic: bool) -> float:
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    gap = abs(new - old)
    part = gap if logarithmic else gap / abs(old) if old else math.inf
    return math.inf if math.isnan(part) else part


def _is_same_value(old: float, new: float, logarithmic: bool, tolerance: float) -> bool:
    # Logarithms differ by what the numbers they are of differ by in part, and are rounded as parts of themselves.
    least = 1.0 if logarithmic else 0.0
    slack = tolerance * max(least, abs(old), abs(new)) if math.isfinite(old) and math.isfinite(new) else 0.0
    return old == new or (math.isnan(old) and math.isnan(new)) or abs(new - old) <= slack


def _is_within_errors(one: Reading, other: Reading) -> bool:
    """Whether a difference says nothing: a solver stopped early, or the standard errors are larger."""
    if not (one.converged and other.converged):
        return True
    errors = [each.stderr for each in (one, other) if each.stderr is not None]
    return bool(errors) and abs(other.value - one.value) <= 1.96 * math.hypot(*errors)
