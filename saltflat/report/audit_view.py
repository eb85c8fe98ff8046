"""What an audit says in words: the same on paper, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.report.audit_summary import compute_max_decades, format_audit_summary
from saltflat.report.change import BROKEN, MOVES, UNDEFINED, UNMEASURED, WITHIN
from saltflat.report.change_text import format_count
from saltflat.report.text import format_number, join_words, make_printable
from saltflat.report.view import SIGNS, format_signs
from saltflat.symmetry.watch import Obstacle
from saltflat.symmetry.words import format_names, format_operation

if TYPE_CHECKING:
    from saltflat.report.audit import Audit, AuditLine

# How kinds of rescaling are spoken of.
KINDS = {"layer": "by layer", "unit": "by unit"}
MOST_OBSTACLES = 6


def format_audit_facts(audit: Audit) -> list[str]:
    """What was audited, and how, in a line."""
    report = audit.report
    tried = [
        f"{format_count(audit.draws, 'draw')} {KINDS.get(kind, kind)} ({format_count(count, 'scale')})"
        for kind, count in audit.scales.items()
        if count
    ]
    said = [format_count(report.examples, "example"), f"loss {format_number(report.loss)}", *tried]
    said += [f"spread {format_number(audit.spread)}", "float64", report.device, f"{format_number(audit.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def sort_measures(audit: Audit) -> list[str]:
    """Names of measures: broken claims first, then what stays, then what moves, the farthest last."""

    def rank(name: str) -> tuple[int, float]:
        changes = list(audit[name].changes.values())
        verdicts = {change.verdict for change in changes}
        if verdicts & {BROKEN}:
            return 0, -compute_max_decades(audit[name])
        if verdicts & {WITHIN}:
            return 1, compute_max_decades(audit[name])
        if verdicts & {MOVES}:
            return 3, compute_max_decades(audit[name])
        return (4, 0.0) if verdicts <= {UNDEFINED, UNMEASURED} else (2, -sum(change.claimed for change in changes))

    return sorted(audit, key=rank)


def format_audit_marks(line: AuditLine) -> str:
    """Signs for what is an estimate, and for solvers that stopped early before or after a draw."""
    shown = format_signs(line.reading).replace("!", "")
    return shown + "!" * any(not change.converged for change in line.changes.values())


def format_audit_footer(audit: Audit) -> list[str]:
    """What stands below the table: signs, draws that failed, what pins scales, and the summary."""
    lines = list(audit.lines.values())
    used = "".join(map(format_audit_marks, lines))
    said = [f"{sign} {meaning}" for sign, meaning in SIGNS.items() if sign in used]
    if any(line.logarithmic for line in lines if line.changes):
        said.append("+ and - are differences, of measures that are logarithms")
    said += [f"Note: {note}" for note in audit.notes]
    for kind, draws in audit.failed.items():
        by_reason: dict[str, list[str]] = {}
        for draw, why in draws.items():
            by_reason.setdefault(why, []).append(draw)
        said += [f"Failed: draw {join_words(names)} {KINDS.get(kind, kind)}: {why}" for why, names in by_reason.items()]
    lost = [name for name, line in audit.items() if UNDEFINED in line.verdicts.values() and line.reading.notes]
    said += [f"Note on {name}: {note}" for name in audit.broken_claims for note in audit[name].reading.notes]
    said += [f"Not defined: {name}: {audit[name].reading.notes[0]}" for name in lost]
    left: dict[str, list[str]] = {}
    for name, why in audit.report.left_out.items():
        left.setdefault(why, []).append(name)
    said += [f"Left out: {join_words(names)}: {why}" for why, names in left.items()]
    said += [*format_missing_rescalings(audit), *format_audit_summary(audit)]
    return [make_printable(each) for each in said]


def format_missing_rescalings(audit: Audit) -> list[str]:
    """Kinds of rescaling that the network does not have, and what stands in their way."""
    none = [kind for kind, count in audit.scales.items() if not count]
    pinned = format_obstacles(audit.obstacles)
    if len(none) == len(audit.scales):
        kinds = "" if len(none) > 1 else f" {KINDS.get(none[0], none[0])}"
        why = (
            f"held fixed by {pinned}"
            if pinned
            else "there is no unit between its inputs and its outputs whose size is free"
        )
        return [f"This network has no rescalings{kinds}: {why}."]
    said = [f"This network has no rescalings {KINDS.get(kind, kind)}, of whole parameters at once." for kind in none]
    return [*said, *([f"Held fixed by {pinned}."] if pinned else [])]


def format_obstacles(obstacles: Sequence[Mapping[str, Any]]) -> str:
    """The operations that hold sizes fixed, each once, with where it was first met."""
    places: dict[str, list[str]] = {}
    for each in sorted(obstacles, key=lambda each: bool(each["known"])):
        found = Obstacle(each["operation"], each["where"], each["line"], each["known"], 0)
        name = format_operation(found) if found.known else f"{found.operation} (which has no rule)"
        places.setdefault(name, []).append(f"in {found.where}" if found.where else f"at {found.line or 'the top'}")
    said = [f"{name} {format_names(dict.fromkeys(where), 1)}" for name, where in places.items()]
    rest = len(said) - MOST_OBSTACLES
    return "; ".join(said[:MOST_OBSTACLES]) + (f"; and {rest} more operations" if rest > 0 else "")
