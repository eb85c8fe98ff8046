"""What an audit says in words: the same on paper, in a terminal and in a notebook."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.report.change import BROKEN, MOVES, STAYS, UNDEFINED, UNMEASURED, WITHIN, Change
from saltflat.report.text import listed, number, printable
from saltflat.report.view import SIGNS, signs

if TYPE_CHECKING:
    from saltflat.report.audit import Audit, AuditLine

# How kinds of rescaling are spoken of.
KINDS = {"layer": "by layer", "unit": "by unit"}
MOST_OBSTACLES = 6
USUAL = "hessian_trace"


def facts(audit: Audit) -> list[str]:
    """What was audited, and how, in a line."""
    report = audit.report
    tried = [
        f"{audit.draws} draws {KINDS.get(kind, kind)} ({count} scale{'s' * (count != 1)})"
        for kind, count in audit.scales.items()
        if count
    ]
    said = [f"{report.examples} example{'s' * (report.examples != 1)}", f"loss {number(report.loss)}", *tried]
    said += [f"spread {number(audit.spread)}", "float64", report.device, f"{number(audit.seconds, 3)} s"]
    return [printable(each) for each in said]


def ordered(audit: Audit) -> list[str]:
    """Names of measures: broken claims first, then what stays, then what moves, the farthest last."""

    def rank(name: str) -> tuple[int, float]:
        changes = list(audit[name].changes.values())
        verdicts = {change.verdict for change in changes}
        if verdicts & {BROKEN}:
            return 0, -decades_of(audit[name])
        if verdicts & {WITHIN}:
            return 1, decades_of(audit[name])
        if verdicts & {MOVES}:
            return 3, decades_of(audit[name])
        return (4, 0.0) if verdicts <= {UNDEFINED, UNMEASURED} else (2, -sum(change.claimed for change in changes))

    return sorted(audit, key=rank)


def decades_of(line: AuditLine) -> float:
    """By how many powers of ten the measure moved at most, up or down; infinite where no ratio tells."""
    found = [abs(each) for kind in line.changes for each in line.decades(kind)]
    told = [each for each in found if not math.isnan(each)]
    return max(told) if told else math.inf if found else 0.0


def change_told(change: Change, logarithmic: bool) -> str:
    """How far it moved: a part of itself where it stayed, else from which to which factor."""
    if change.verdict in (UNDEFINED, UNMEASURED):
        return ""
    if change.stays:
        return "exactly" if change.moved == 0 else f"within {short(change.moved, 1)}"
    some = [value for value in change.values if value is not None]
    lost = ", or undefined" if any(map(math.isnan, some)) and not math.isnan(change.smallest) else ""
    if math.isnan(change.smallest):
        return "undefined"
    if logarithmic:
        ends = [short(end, 3, "+") for end in (change.smallest, change.largest)]
    elif math.isinf(change.smallest):
        return "away from 0" + lost
    else:
        ends = [short(end) for end in (change.smallest, change.largest)]
    return "x " * (not logarithmic) + " to ".join(dict.fromkeys(ends)) + lost


def short(value: float, digits: int = 2, sign: str = "") -> str:
    """A number in as few letters as can be.

    Example:
        >>> short(12345.0), short(123.0), short(2.4e-12, 1)
        ('1.2e4', '120', '2e-12')
    """
    if 10**digits <= abs(value) < 1e4:
        value, digits = float(f"{value:.{digits}g}"), 4
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{value:{sign}.{digits}g}")


def marks(line: AuditLine) -> str:
    """Signs for what is an estimate, and for solvers that stopped early before or after a draw."""
    shown = signs(line.reading).replace("!", "")
    return shown + "!" * any(not change.converged for change in line.changes.values())


def below(audit: Audit) -> list[str]:
    """What stands below the table: signs, draws that failed, what pins scales, and the summary."""
    lines = list(audit.lines.values())
    used = "".join(map(marks, lines))
    said = [f"{sign} {meaning}" for sign, meaning in SIGNS.items() if sign in used]
    if any(line.logarithmic for line in lines if line.changes):
        said.append("+ and - are differences, of measures that are logarithms")
    said += [f"Note: {note}" for note in audit.notes]
    for kind, draws in audit.failed.items():
        by_reason: dict[str, list[str]] = {}
        for draw, why in draws.items():
            by_reason.setdefault(why, []).append(draw)
        said += [f"Failed: draw {listed(names)} {KINDS.get(kind, kind)}: {why}" for why, names in by_reason.items()]
    lost = [name for name, line in audit.items() if UNDEFINED in line.verdicts.values() and line.reading.notes]
    said += [f"Not defined: {name}: {audit[name].reading.notes[0]}" for name in lost]
    left: dict[str, list[str]] = {}
    for name, why in audit.report.left_out.items():
        left.setdefault(why, []).append(name)
    said += [f"Left out: {listed(names)}: {why}" for why, names in left.items()]
    said += [*missing(audit), *summary(audit)]
    return [printable(each) for each in said]


def missing(audit: Audit) -> list[str]:
    """Kinds of rescaling that the network does not have, and what stands in their way."""
    none = [kind for kind, count in audit.scales.items() if not count]
    pinned = obstacles_told(audit.obstacles)
    if len(none) == len(audit.scales):
        kinds = "" if len(none) > 1 else f" {KINDS.get(none[0], none[0])}"
        why = pinned or "there is no unit between its inputs and its outputs whose size is free"
        return [f"This network has no rescalings{kinds}: {why}."]
    said = [f"This network has no rescalings {KINDS.get(kind, kind)}, of whole parameters at once." for kind in none]
    return [*said, *([f"Held fixed: {pinned}."] if pinned else [])]


def obstacles_told(obstacles: Sequence[Mapping[str, Any]]) -> str:
    """The operations that hold sizes fixed, each once, with where it was first met."""
    places: dict[tuple[str, bool], list[str]] = {}
    for each in obstacles:
        where = f"in {each['where']!r}" if each["where"] else "in the model"
        places.setdefault((each["operation"], each["known"]), []).append(each["line"] or where)
    said = [
        f"{operation}{'' if known else ' (no rule for it)'}, {where[0]}"
        + (f" and {len(where) - 1} more" if len(where) > 1 else "")
        for (operation, known), where in places.items()
    ]
    rest = len(said) - MOST_OBSTACLES
    return "; ".join(said[:MOST_OBSTACLES]) + (f"; and {rest} more operations" if rest > 0 else "")


def summary(audit: Audit) -> list[str]:
    """The audit in a sentence or two."""
    if not any(line.changes for line in audit.values()):
        return []
    said = [f"{name} {_farthest(audit[name])}, though it claims to stay." for name in audit.broken]
    movers = [name for name in audit if MOVES in audit[name].verdicts.values()]
    kept = {
        name: max(change.moved for change in line.changes.values() if change.verdict == STAYS)
        for name, line in audit.items()
        if STAYS in line.verdicts.values() and name not in audit.broken
    }
    parts = []
    if movers:
        # The number that most people take for flatness, if it is there.
        most = USUAL if USUAL in movers else max(movers, key=lambda name: _told_well(audit[name]))
        parts.append(f"{most} {_farthest(audit[most])}")
    if kept:
        who = next(iter(kept)) if len(kept) == 1 else f"the {len(kept)} measures that claim to stay"
        worst = max(kept.values())
        parts.append(f"{who} stayed {f'within {short(worst, 1)}' if worst else 'exactly'}")
    return [*said, " while ".join(parts) + "."] if parts else said


def _farthest(line: AuditLine) -> str:
    if line.logarithmic:
        return f"moved by {short(max(change.moved for change in line.changes.values()))}"
    if not _ratios_tell(line):
        return "changed its sign, or became or was zero, infinite or undefined"
    return f"moved by a factor of {short(10 ** decades_of(line))}"


def _told_well(line: AuditLine) -> tuple[bool, float]:
    """Factors before differences, and numbers before what is none."""
    return _ratios_tell(line) and not line.logarithmic, decades_of(line)


def _ratios_tell(line: AuditLine) -> bool:
    return all(math.isfinite(each) for kind in line.changes for each in line.decades(kind))
