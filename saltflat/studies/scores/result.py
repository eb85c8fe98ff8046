"""What all scores say of one measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from saltflat.errors import StudyError
from saltflat.report.plain import decode_nonfinite, encode_nonfinite

UNDEFINED = float("nan")
NUMBERS = (
    "pearson",
    "spearman",
    "kendall_a",
    "kendall_b",
    "granulated",
    "cmi",
    "pgdl",
    "sign_error_mean",
    "sign_error_p90",
    "sign_error_max",
)
KINDS = ("measure", "control")


@dataclass(frozen=True, eq=False)
class Score:
    """How one measure, or a control, goes with the gap. A score that is undefined is nan, with the reason in the notes.

    Two scores are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        name: of the measure or control.
        kind: ``"measure"`` or ``"control"``.
        runs: how many it was scored on.
        pearson, spearman, kendall_a, kendall_b: from -1 to 1; positive where the value grows with the gap.
        granulated: Kendall along each axis, all else fixed, averaged over the axes; from -1 to 1.
        granulated_by_axis: the same for each axis.
        cmi: what it tells beyond any two settings, from 0 to 1.
        cmi_by_set: the same beyond each set of settings, ``"lr + batch"``; ``""`` is beyond none.
        pgdl: the PGDL competition's form of it, from 0 to 100.
        sign_error_mean, sign_error_p90, sign_error_max: over environments, from 0 to 1; smaller is better, 0.5 a coin.
        intervals: 95 % bootstrap intervals by the name of the score.
        notes: what a reader should know besides.
    """

    name: str
    kind: str
    runs: int
    pearson: float = UNDEFINED
    spearman: float = UNDEFINED
    kendall_a: float = UNDEFINED
    kendall_b: float = UNDEFINED
    granulated: float = UNDEFINED
    granulated_by_axis: Mapping[str, float] = field(default_factory=dict)
    cmi: float = UNDEFINED
    cmi_by_set: Mapping[str, float] = field(default_factory=dict)
    pgdl: float = UNDEFINED
    sign_error_mean: float = UNDEFINED
    sign_error_p90: float = UNDEFINED
    sign_error_max: float = UNDEFINED
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        tidy: dict[str, Any] = {name: float(getattr(self, name)) for name in NUMBERS}
        tidy["runs"] = int(self.runs)
        for name in ("granulated_by_axis", "cmi_by_set"):
            tidy[name] = {str(key): float(value) for key, value in getattr(self, name).items()}
        tidy["intervals"] = {str(name): (float(low), float(high)) for name, (low, high) in self.intervals.items()}
        tidy["notes"] = tuple(str(note) for note in self.notes)
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Score) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.report.plain``."""
        return {each.name: encode_nonfinite(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Score:
        """The score that ``to_dict`` was called on."""
        try:
            found = cls(**{key: decode_nonfinite(value) for key, value in given.items()})
            # Reading is lenient: what does not come out again as it went in was not written by us.
            if found.to_dict() != given or found.kind not in KINDS or not isinstance(found.name, str):
                raise TypeError("a field has a value of another kind")
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as problem:
            raise StudyError(
                f"Got a score that cannot be understood ({problem}). Want what Score.to_dict gives. Do: score again."
            ) from problem
        return found
