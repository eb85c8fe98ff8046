"""The scores of a study: all scores of every measure."""

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
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.results.json_codec``."""
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
                f"Expected what Score.to_dict gives, but got a score that cannot be understood ({problem}). Try "
                "scoring again."
            ) from problem
        return found


SCHEMA = "saltflat.scores/1"


@dataclass(frozen=True, eq=False, repr=False)
class Scores(Displayable):
    """Every measure and every control against the gap; prints as a table.

    Attributes:
        scores: by name, measures first.
        gap: ``"error"`` or ``"loss"``, test minus training.
        axes: what the grid varies, without the seed.
        runs: how many were scored.
        configurations: how many of them differ in more than the seed.
        left_out: how many runs were not scored, by reason.
        warnings: why these scores should be doubted.
        notes: how they were taken.
        resamples: behind each interval; fewer, as the notes say, for those that take long.
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
        """Kendall's tau that the best of as many measures reaches half of the time without relation to the gap."""
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
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.results.json_codec``."""
        parts = {
            each.name: encode_nonfinite(getattr(self, each.name)) for each in fields(self) if each.name != "scores"
        }
        found = {encode_key(name): each.to_dict() for name, each in self.scores.items()}
        return {"schema": SCHEMA, "scores": found, **parts}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Scores:
        """The scores that ``to_dict`` was called on."""
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
                f"Expected what Scores.to_dict gives, but got scores that cannot be understood ({problem}). Try "
                "scoring again."
            ) from problem
        return found

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame`` with a row per measure and control, and the ends of the intervals as columns."""
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
