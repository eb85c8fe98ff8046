"""An audit as rows of a table, with a strip of dots: how far every draw moved the measure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saltflat.report.audit_view import KINDS, format_audit_facts, format_audit_footer, format_audit_marks, sort_measures
from saltflat.report.change import BROKEN, MOVES, STAYS, UNCLAIMED
from saltflat.report.change_text import format_change, format_power
from saltflat.report.text import format_number

if TYPE_CHECKING:
    from saltflat.report.audit import Audit, AuditLine

TONES = {STAYS: "good", UNCLAIMED: "good", MOVES: "plain", BROKEN: "bad"}
WIDTH = 100
LEAST_DECADES = 0.5


@dataclass(frozen=True)
class ChangeView:
    """What one kind of rescaling did to one measure; ``path`` has a dot per draw, on a strip 100 wide."""

    told: str
    verdict: str
    tone: str
    path: str


@dataclass(frozen=True)
class AuditView:
    """An audit, ready to be shown; ``reach`` says which factor is at the right end of the strips."""

    model: str
    facts: list[str]
    kinds: list[str]
    lines: list[tuple[str, str, str, str, list[ChangeView]]]
    reach: str
    holds: bool
    below: list[str]


def build_audit_view(audit: Audit) -> AuditView:
    """Measures that break their claim first, those that move farthest last."""
    kinds = list(dict.fromkeys(kind for line in audit.values() for kind in line.changes))
    # Logarithms count powers of huge numbers, and would press all others into the middle.
    counted = [line for line in audit.values() if not line.logarithmic]
    found = [abs(each) for line in counted for kind in line.changes for each in line.compute_draw_decades(kind)]
    reach = max([LEAST_DECADES, *filter(math.isfinite, found)])
    lines = [
        (
            name,
            format_audit_marks(audit[name]),
            format_number(audit[name].reading.value),
            str(audit.report.legend.get(name, {}).get("meaning", "")),
            [_build_change_view(audit[name], kind, reach) for kind in kinds],
        )
        for name in sort_measures(audit)
    ]
    said = [KINDS.get(kind, kind) for kind in kinds]
    return AuditView(
        audit.report.model,
        format_audit_facts(audit),
        said,
        lines,
        format_power(reach),
        audit.holds,
        format_audit_footer(audit),
    )


def _build_change_view(line: AuditLine, kind: str, reach: float) -> ChangeView:
    change = line.changes[kind]
    places = [each for each in line.compute_draw_decades(kind) if not math.isnan(each)]
    # From or to zero is infinitely far: at the end of the strip.
    ends = [max(-1.0, min(1.0, each / reach)) for each in places]
    path = "".join(f"M{WIDTH / 2 + each * (WIDTH / 2 - 4):.1f} 8h0" for each in ends)
    return ChangeView(format_change(change, line.logarithmic), change.verdict, TONES.get(change.verdict, "plain"), path)
