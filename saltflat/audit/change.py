"""Judge how far a measure moved when the weights were rescaled, and whether it claims not to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saltflat.results.report import Reading

if TYPE_CHECKING:
    from saltflat.audit.result import Audit, AuditLine


STAYS = "stays, as claimed"
MOVES = "moves, as expected"
BROKEN = "MOVES, though claimed to stay"
UNCLAIMED = "stays, though not claimed"
WITHIN = "moves, within its errors"
UNDEFINED = "not defined"
UNMEASURED = "no draw was measured"
# The verdicts on a measure that claims to be invariant, and on one that does not.
VERDICTS = {True: (STAYS, BROKEN, WITHIN, UNDEFINED, UNMEASURED), False: (MOVES, UNCLAIMED, UNDEFINED, UNMEASURED)}

# The largest relative change that counts as none.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Change:
    """One measure under the draws of one kind of rescaling.

    Attributes:
        claimed: whether the measure claims to be invariant.
        values: the measure after each draw; nan where undefined, None where the draw failed.
        smallest: the smallest ratio of a value to the one before; for logarithms the smallest difference.
        largest: the largest of them.
        moved: the largest relative change; for logarithms the largest difference. Infinite where a value appears,
            disappears or leaves zero.
        verdict: whether it stayed, and whether it claims to.
        converged: False if a solver stopped early before or after some draw.
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
        """Whether the measure is the same after all draws."""
        return self.verdict in (STAYS, UNCLAIMED)


def compute_change(
    before: Reading, after: Sequence[Reading | None], claimed: bool, logarithmic: bool, tolerance: float = TOLERANCE
) -> Change:
    """Return how the draws changed a reading.

    Args:
        before: the reading of the network itself.
        after: the reading of every draw; None for draws that could not be measured.
        claimed: whether the measure claims to be invariant.
        logarithmic: whether differences matter, not ratios.
        tolerance: the largest relative change that counts as none.

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
    """Return the ratio of two values, or the difference of logarithmic ones; nan where one is undefined.

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
    """Return by how many powers of ten a measure was multiplied.

    It is nan where a ratio has no meaning and infinite from or to 0. For a logarithmic measure it is about the quantity
    whose logarithm it is.

    Example:
        >>> compute_decades(2.0, 200.0, logarithmic=False), compute_decades(1e200, 1e-200, logarithmic=False)
        (2.0, -400.0)
    """
    step = compute_step(old, new, logarithmic)
    if logarithmic:
        return step / math.log(10)
    if math.isfinite(old) and math.isfinite(new) and old * math.copysign(1.0, new) > 0 and new:
        # Such ratios may overflow, their logarithms do not.
        return math.log10(step) if 1e-300 < step < 1e300 else math.log10(abs(new)) - math.log10(abs(old))
    return math.nan if math.isnan(step) or step < 0 else math.log10(step) if step else -math.inf


def _compute_relative_change(old: float, new: float, logarithmic: bool) -> float:
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    gap = abs(new - old)
    part = gap if logarithmic else gap / abs(old) if old else math.inf
    return math.inf if math.isnan(part) else part


def _is_same_value(old: float, new: float, logarithmic: bool, tolerance: float) -> bool:
    # A difference of logarithms is a relative change, and their rounding is relative to themselves.
    least = 1.0 if logarithmic else 0.0
    slack = tolerance * max(least, abs(old), abs(new)) if math.isfinite(old) and math.isfinite(new) else 0.0
    return old == new or (math.isnan(old) and math.isnan(new)) or abs(new - old) <= slack


def _is_within_errors(one: Reading, other: Reading) -> bool:
    """Return whether a difference is insignificant: a solver stopped early, or the standard errors are larger."""
    if not (one.converged and other.converged):
        return True
    errors = [each.stderr for each in (one, other) if each.stderr is not None]
    return bool(errors) and abs(other.value - one.value) <= 1.96 * math.hypot(*errors)


# The invariance that a measure claims, for each kind of rescaling.
CLAIMS = {"layer": "layer_scale", "unit": "unit_scale"}
OBSTACLE = {"operation": str, "where": str, "line": str, "known": bool}


def check_audit(audit: Audit) -> None:
    """Check an audit that was read from a file; raise a ValueError that says what is wrong."""
    for wrong in _find_audit_errors(audit):
        raise ValueError(wrong)


def _find_audit_errors(audit: Audit) -> Iterator[str]:
    if audit.draws < 1:
        yield f"draws is {audit.draws}"
    if not audit.scales or not set(audit.scales) <= set(CLAIMS):
        yield f"the kinds of scales are {list(audit.scales)}, expected some of {list(CLAIMS)}"
    if any(count < 0 for count in audit.scales.values()):
        yield "scales is negative"
    if not set(audit.failed) <= set(audit.scales):
        yield f"failed has the kinds {list(audit.failed)}, not all of which are kinds of scales"
    if set(audit.lines) != set(audit.report):
        yield "the lines do not match the measures in the report"
    for each in audit.obstacles:
        if not isinstance(each, Mapping) or any(type(each.get(key)) is not kind for key, kind in OBSTACLE.items()):
            yield "an obstacle is not a mapping with the strings operation, where and line and the boolean known"
    drawn = {kind for kind, count in audit.scales.items() if count}
    for name, line in audit.items():
        yield from (f"{name}: {wrong}" for wrong in _find_line_errors(line, drawn, audit.draws))


def _find_line_errors(line: AuditLine, drawn: set[str], draws: int) -> Iterator[str]:
    if type(line.logarithmic) is not bool:
        yield "logarithmic is neither true nor false"
    if not set(line.claims) <= set(CLAIMS.values()):
        yield f"the claims are {list(line.claims)}, expected some of {list(CLAIMS.values())}"
    if set(line.changes) != drawn:
        yield f"the changes have the kinds {sorted(line.changes)}, but the scales {sorted(drawn)}"
    for kind, change in line.changes.items():
        for wrong in _find_change_errors(change, draws):
            yield f"{kind}: {wrong}"
        if change.claimed is not (CLAIMS[kind] in line.claims):
            yield f"{kind}: claimed is {change.claimed!r}, which the claims contradict"


def _find_change_errors(change: Change, draws: int) -> Iterator[str]:
    if not all(type(each) is bool for each in (change.claimed, change.converged)):
        yield "claimed or converged is neither true nor false"
    if change.verdict not in VERDICTS[bool(change.claimed)]:
        yield f"the verdict {change.verdict!r} is unknown, or contradicts claimed={change.claimed!r}"
    if len(change.values) != draws:
        yield f"there are {len(change.values)} values for {draws} draws"
    if not all(value is None or _is_float(value) for value in change.values):
        yield "a value is neither a number nor null"
    if not all(map(_is_float, (change.smallest, change.largest, change.moved))):
        yield "smallest, largest or moved is not a number"


def _is_float(value: float | None) -> bool:
    return type(value) is float
