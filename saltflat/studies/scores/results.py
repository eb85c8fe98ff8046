"""The scores of a study: every measure and control against the generalization gap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from saltflat.errors import StudyError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import build_frame
from saltflat.results.json_codec import decode_nonfinite, encode_key, encode_nonfinite
from saltflat.studies.scores.caveats import compute_best_by_chance

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
    """How well one measure or control predicts the gap. An undefined score is nan, with the reason in the notes.

    Two scores are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        name: the name of the measure or control.
        kind: ``"measure"`` or ``"control"``.
        runs: the number of runs it was scored on.
        pearson, spearman, kendall_a, kendall_b: from -1 to 1; positive if the value grows with the gap.
        granulated: Kendall's tau along each axis with all else fixed, averaged over the axes; from -1 to 1.
        granulated_by_axis: the same for each axis.
        cmi: information on the gap beyond any two settings, from 0 to 1.
        cmi_by_set: the same beyond each set of settings, ``"lr + batch"``; ``""`` is the empty set.
        pgdl: its form in the PGDL competition, from 0 to 100.
        sign_error_mean, sign_error_p90, sign_error_max: over environments, 0 to 1; smaller is better, 0.5 is chance.
        intervals: 95 % bootstrap intervals by the name of the score.
        notes: remarks for the reader.
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
        """Return strict JSON; numbers that are not finite are encoded, see ``saltflat.results.json_codec``."""
        return {each.name: encode_nonfinite(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Score:
        """Return the score that ``to_dict`` was called on."""
        try:
            found = cls(**{key: decode_nonfinite(value) for key, value in given.items()})
            # Parsing is lenient: a dictionary that does not survive the round trip was not written by us.
            if found.to_dict() != given or found.kind not in KINDS or not isinstance(found.name, str):
                raise TypeError("a field has a value of another kind")
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as problem:
            raise StudyError(
                f"Expected the output of Score.to_dict, but got a score that cannot be understood ({problem}). Try "
                "scoring again."
            ) from problem
        return found


SCHEMA = "saltflat.scores/1"


@dataclass(frozen=True, eq=False, repr=False)
class Scores(Displayable):
    """Scores of every measure and control against the gap; prints as a table.

    Attributes:
        scores: by name, measures first.
        gap: ``"error"`` or ``"loss"``, test minus training.
        axes: the settings that the grid varies, without the seed.
        runs: the number of scored runs.
        configurations: the number of these that differ in more than the seed.
        left_out: the number of runs not scored, by reason.
        warnings: reasons to doubt these scores.
        notes: how they were computed.
        resamples: the number behind each interval; fewer for costly scores, see the notes.
    """

    renderer = ("scores", "ScoresTable", "")

    scores: Mapping[str, Score]
    gap: str
    axes: tuple[str, ...]
    runs: int
    configurations: int
    left_out: Mapping[str, int]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    resamples: int

    def __post_init__(self) -> None:
        tidy: dict[str, Any] = {
            "scores": dict(self.scores),
            "left_out": {str(reason): int(count) for reason, count in self.left_out.items()},
            **{name: tuple(map(str, getattr(self, name))) for name in ("axes", "warnings", "notes")},
            **{name: int(getattr(self, name)) for name in ("runs", "configurations", "resamples")},
        }
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    @property
    def chance(self) -> float:
        """Return the Kendall's tau that the best of as many measures unrelated to the gap reaches half of the time."""
        return compute_best_by_chance(sum(each.kind == "measure" for each in self.scores.values()), self.configurations)

    def __getitem__(self, name: str) -> Score:
        if name not in self.scores:
            raise make_unknown_name_error("score", name, self.scores)
        return self.scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Scores) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Scores of {len(self)} measures and controls on {self.runs} runs; print() shows them>"

    def to_dict(self) -> dict[str, Any]:
        """Return strict JSON; numbers that are not finite are encoded, see ``saltflat.results.json_codec``."""
        parts = {
            each.name: encode_nonfinite(getattr(self, each.name)) for each in fields(self) if each.name != "scores"
        }
        found = {encode_key(name): each.to_dict() for name, each in self.scores.items()}
        return {"schema": SCHEMA, "scores": found, **parts}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Scores:
        """Return the scores that ``to_dict`` was called on."""
        try:
            if given["schema"] != SCHEMA:
                raise ValueError(f"the schema is {given['schema']!r}, not {SCHEMA!r}")
            parts = {key: decode_nonfinite(value) for key, value in given.items() if key not in ("schema", "scores")}
            names = {name.removeprefix("$"): each for name, each in given["scores"].items()}
            found = cls({name: Score.from_dict(each) for name, each in names.items()}, **parts)
            if found.to_dict() != given:
                raise TypeError("a field has a value of another kind")
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
            raise StudyError(
                f"Expected the output of Scores.to_dict, but got scores that cannot be understood ({problem}). Try "
                "scoring again."
            ) from problem
        return found

    def to_frame(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per measure and control, and the ends of intervals as columns."""
        rows = [self._make_row(each) for each in self.scores.values()]
        return build_frame(rows, list(dict.fromkeys(name for row in rows for name in row)))

    def _make_row(self, score: Score) -> dict[str, Any]:
        row: dict[str, Any] = {"name": score.name, "kind": score.kind, "runs": score.runs}
        for name in NUMBERS:
            row[name] = getattr(score, name)
            if name in score.intervals:
                row[f"{name}_low"], row[f"{name}_high"] = score.intervals[name]
        row |= {f"granulated[{axis}]": score.granulated_by_axis.get(axis, float("nan")) for axis in self.axes}
        return row | {"notes": " ".join(score.notes)}
