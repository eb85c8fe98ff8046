"""Whether an audit that was read from a file is one that can have been written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from saltflat.report.change import VERDICTS, Change

if TYPE_CHECKING:
    from saltflat.report.audit import Audit, AuditLine

# The symmetry that a measure claims, for each kind of rescaling.
CLAIMS = {"layer": "layer_scale", "unit": "unit_scale"}
OBSTACLE = {"operation": str, "where": str, "line": str, "known": bool}


def check_audit(audit: Audit) -> None:
    """Raise a ValueError that says what is wrong, if anything is."""
    for wrong in _find_audit_errors(audit):
        raise ValueError(wrong)


def _find_audit_errors(audit: Audit) -> Iterator[str]:
    if audit.draws < 1:
        yield f"draws is {audit.draws}"
    if not audit.scales or not set(audit.scales) <= set(CLAIMS):
        yield f"the kinds of scales are {list(audit.scales)}, not some of {list(CLAIMS)}"
    if any(count < 0 for count in audit.scales.values()):
        yield "scales is negative"
    if not set(audit.failed) <= set(audit.scales):
        yield f"draws of the kinds {list(audit.failed)} failed, which are not all among those of the scales"
    if set(audit.lines) != set(audit.report):
        yield "the lines are not those of the measures in the report"
    for each in audit.obstacles:
        if not isinstance(each, Mapping) or any(type(each.get(key)) is not kind for key, kind in OBSTACLE.items()):
            yield "an obstacle is no mapping with the texts operation, where and line, and with known"
    drawn = {kind for kind, count in audit.scales.items() if count}
    for name, line in audit.items():
        yield from (f"{name}: {wrong}" for wrong in _find_line_errors(line, drawn, audit.draws))


def _find_line_errors(line: AuditLine, drawn: set[str], draws: int) -> Iterator[str]:
    if type(line.logarithmic) is not bool:
        yield "logarithmic is neither true nor false"
    if not set(line.claims) <= set(CLAIMS.values()):
        yield f"the claims are {list(line.claims)}, not some of {list(CLAIMS.values())}"
    if set(line.changes) != drawn:
        yield f"the changes are of the kinds {sorted(line.changes)}, and the scales of {sorted(drawn)}"
    for kind, change in line.changes.items():
        for wrong in _find_change_errors(change, draws):
            yield f"{kind}: {wrong}"
        if change.claimed is not (CLAIMS[kind] in line.claims):
            yield f"{kind}: claimed is {change.claimed!r}, which the claims contradict"


def _find_change_errors(change: Change, draws: int) -> Iterator[str]:
    if not all(type(each) is bool for each in (change.claimed, change.converged)):
        yield "claimed or converged is neither true nor false"
    if change.verdict not in VERDICTS[bool(change.claimed)]:
        yield f"the verdict {change.verdict!r} is not known, or not of what is {'not ' * (not change.claimed)}claimed"
    if len(change.values) != draws:
        yield f"there are {len(change.values)} values for {draws} draws"
    if not all(value is None or _is_float(value) for value in change.values):
        yield "a value is neither a number nor null"
    if not all(map(_is_float, (change.smallest, change.largest, change.moved))):
        yield "smallest, largest or moved is no number"


def _is_float(value: Any) -> bool:
    return type(value) is float
