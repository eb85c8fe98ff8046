"""An audit in a sentence or two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from saltflat.report.change import BROKEN, MOVES, STAYS
from saltflat.report.change_text import format_power, format_short

if TYPE_CHECKING:
    from saltflat.report.audit import Audit, AuditLine

# The number that most people take for flatness.
USUAL = "hessian_trace"


def format_audit_summary(audit: Audit) -> list[str]:
    """Which claims broke, what moved farthest, and how still the others stayed."""
    said = [
        f"{name} {_format_farthest_move(audit[name], BROKEN)}, though it claims to stay."
        for name in audit.broken_claims
    ]
    movers = [name for name in audit if MOVES in audit[name].verdicts.values() and name not in audit.broken_claims]
    kept = {name: moved for name, line in audit.items() if (moved := _compute_claimed_change(line)) is not None}
    parts = []
    if movers:
        most = USUAL if USUAL in movers else max(movers, key=lambda name: _rank_mover(audit[name]))
        parts.append(f"{most} {_format_farthest_move(audit[most], MOVES)}")
    if kept:
        one = next(iter(kept))
        if len(kept) == 1:
            who = "it" if movers and most == one else one
            where = "where it claims to"
        else:
            who = f"{'the' if parts else 'The'} {len(kept)} measures that claim to stay"
            where = "where they claim to"
        worst = max(kept.values())
        parts.append(f"{who} stayed {where}, {f'within {format_short(worst, 1)}' if worst else 'exactly'}")
    return [*said, " while ".join(parts) + "."] if parts else said


def compute_max_decades(line: AuditLine, *verdicts: str) -> float:
    """By how many powers of ten the measure moved at most, up or down; infinite where no ratio tells.

    Args:
        line: the measure.
        verdicts: only the kinds of rescaling that got one of these, if any are given.
    """
    found = [abs(each) for kind in _select_kinds(line, verdicts) for each in line.compute_draw_decades(kind)]
    told = [each for each in found if not math.isnan(each)]
    return max(told) if told else math.inf if found else 0.0


def _compute_claimed_change(line: AuditLine) -> float | None:
    """By how much a measure moved that stayed wherever it claims to; None for others."""
    claimed = [change for change in line.changes.values() if change.claimed]
    if not claimed or any(change.verdict != STAYS for change in claimed):
        return None
    return max(change.moved for change in claimed)


def _format_farthest_move(line: AuditLine, verdict: str) -> str:
    if line.logarithmic:
        return f"moved by {format_short(max(line.changes[kind].moved for kind in _select_kinds(line, [verdict])))}"
    if not _has_finite_ratios(line, verdict):
        return "changed its sign, or became or was zero, infinite or undefined"
    return f"moved by a factor of {format_power(compute_max_decades(line, verdict))}"


def _rank_mover(line: AuditLine) -> tuple[bool, float]:
    """Factors before differences, and numbers before what is none."""
    return _has_finite_ratios(line, MOVES) and not line.logarithmic, compute_max_decades(line, MOVES)


def _has_finite_ratios(line: AuditLine, verdict: str) -> bool:
    return all(
        math.isfinite(each) for kind in _select_kinds(line, [verdict]) for each in line.compute_draw_decades(kind)
    )


def _select_kinds(line: AuditLine, verdicts: Sequence[str]) -> list[str]:
    return [kind for kind, found in line.verdicts.items() if not verdicts or found in verdicts]
