"""The result of an audit: how far every measure moved, and whether it had claimed to be invariant."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat._late import load_later
from saltflat.audit.change import BROKEN, Change, check_audit, compute_decades
from saltflat.errors import ReportError
from saltflat.results.display import Displayable
from saltflat.results.files import AUDIT, check_schema, read_json, write_json
from saltflat.results.json_codec import decode_nonfinite, encode_key, encode_nonfinite, to_plain_types
from saltflat.results.report import Reading, Report, make_missing_measure_error, normalize_measure_name
from saltflat.results.text import format_count, make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class AuditLine:
    """One measure under all draws.

    Attributes:
        reading: of the network as it is.
        claims: the symmetries that the measure claims not to notice.
        logarithmic: whether differences tell, not ratios.
        changes: by kind of rescaling; a kind that the network does not have is not there.
    """

    reading: Reading
    claims: tuple[str, ...]
    logarithmic: bool
    changes: Mapping[str, Change]

    @property
    def verdicts(self) -> dict[str, str]:
        return {kind: change.verdict for kind, change in self.changes.items()}

    @property
    def values(self) -> dict[str, tuple[float | None, ...]]:
        """The measure after each draw; nan where it was not defined, None where the draw failed."""
        return {kind: change.values for kind, change in self.changes.items()}

    def compute_draw_decades(self, kind: str) -> list[float]:
        """By how many powers of ten each draw multiplied the measure; nan where no ratio tells, infinite from or to 0.

        Logarithmic measures count the powers of what they are the logarithm of.
        """
        return [
            compute_decades(self.reading.value, value, self.logarithmic)
            for value in self.changes[kind].values
            if value is not None
        ]

    def __repr__(self) -> str:
        told = "; ".join(f"{kind} {verdict}" for kind, verdict in self.verdicts.items())
        return f"<AuditLine of {make_printable(self.reading.name)}: {told or 'no draws'}>"


@dataclass(frozen=True, eq=False, repr=False)
class Audit(Displayable, Mapping[str, AuditLine]):
    """What random rescalings did to every measure, by the name of the measure.

    Two audits are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        report: the network as it is, measured in float64.
        lines: what the mapping shows.
        scales: by kind of rescaling, how many independent ones the network has.
        obstacles: operations that hold sizes fixed: ``operation``, ``where``, ``line``, and whether it is ``known``.
        failed: by kind, the draws that could not be measured, and why.
        draws: how many rescalings of each kind were tried.
        spread: standard deviation of the logarithms of the factors.
        seed: draw i of a kind is ``saltflat.rescale(model, example, seed=seed + i, spread=spread, kind=kind)``, in
            float64.
        tolerance: the largest part of itself by which a measure may move and still be said to stay.
        seconds: how long it all took.
        notes: what a reader should know besides.
        created: when, ISO time in UTC.
    """

    renderer = ("audit", "AuditTable", "render_audit_html")

    report: Report
    lines: Mapping[str, AuditLine]
    scales: Mapping[str, int]
    obstacles: tuple[Mapping[str, Any], ...]
    failed: Mapping[str, Mapping[str, str]]
    draws: int
    spread: float
    seed: int
    tolerance: float
    seconds: float
    notes: tuple[str, ...]
    created: str

    def __post_init__(self) -> None:
        tidy: dict[str, Any] = {
            "lines": dict(self.lines),
            "scales": {str(kind): int(count) for kind, count in self.scales.items()},
            "obstacles": tuple(to_plain_types(each, "the obstacles") for each in self.obstacles),
            "failed": {kind: {str(k): str(why) for k, why in draws.items()} for kind, draws in self.failed.items()},
            "draws": int(self.draws),
            "spread": float(self.spread),
            "seed": int(self.seed),
            "tolerance": float(self.tolerance),
            "seconds": float(self.seconds),
            "notes": tuple(str(note) for note in self.notes),
            "created": str(self.created),
        }
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    @property
    def holds(self) -> bool:
        """Whether no measure moved that claims to stay."""
        return not self.broken_claims

    @property
    def broken_claims(self) -> list[str]:
        """The measures that moved, though they claim to stay."""
        return [name for name, line in self.items() if BROKEN in line.verdicts.values()]

    def __getitem__(self, name: str) -> AuditLine:
        key = normalize_measure_name(name, self.lines)
        if key in self.lines:
            return self.lines[key]
        raise make_missing_measure_error(key, self.report.left_out, self.lines)

    def get(self, name: str, default: Any = None, /) -> Any:
        return self.lines.get(normalize_measure_name(name, self.lines), default)

    def __contains__(self, name: object) -> bool:
        return normalize_measure_name(name, self.lines) in self.lines

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Audit) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        size = f"{format_count(len(self), 'measure')}, {format_count(self.draws, 'draw')}"
        return f"<Audit of {make_printable(self.report.model)}: {size}; print() shows it>"

    def plot(self) -> Figure:
        """A ``matplotlib`` Figure: a row per measure with a dot per draw, at the factor by which the draw moved it."""
        figure: Figure = load_later("render.audit_plot").draw_audit(self)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.results.json_codec``."""
        parts = {
            each.name: encode_nonfinite(getattr(self, each.name)) for each in fields(self) if each.name not in OWN_FORM
        }
        lines = {encode_key(name): _line_to_dict(line) for name, line in self.items()}
        return {"schema": AUDIT.schema, "report": self.report.to_dict(), "lines": lines, "holds": self.holds, **parts}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Audit:
        """The audit that ``to_dict`` was called on."""
        return cls._parse_dict(given, "a mapping")

    @classmethod
    def _parse_dict(cls, given: Mapping[str, Any], source: str) -> Audit:
        check_schema(given, source, AUDIT)
        try:
            report = Report.from_dict(given["report"])
            parts = {
                key: decode_nonfinite(value)
                for key, value in given.items()
                if key not in ("schema", "holds", *OWN_FORM)
            }
            lines = {name.removeprefix("$"): line for name, line in given["lines"].items()}
            audit = cls(report, {name: _parse_line(line, report[name]) for name, line in lines.items()}, **parts)
            if given["holds"] is not audit.holds:
                raise ValueError(f"holds is {given['holds']!r}, which the verdicts contradict")
            # Reading is lenient: what does not come out again as it went in was not written by us.
            if audit.to_dict() != given:
                raise TypeError("a field has a value of another kind")
            check_audit(audit)
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, LookupError) as problem:
            why = problem.__cause__ if isinstance(problem, ReportError) and problem.__cause__ else problem
            raise ReportError(
                f"Expected what Audit.to_dict gives, but got {source}, an audit that cannot be understood "
                f"({type(why).__name__}: {why}). Try auditing again, or taking the file from a backup."
            ) from problem
        return audit

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the audit as JSON and give the path back; a file that was there is replaced, whole or not at all."""
        return write_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Audit:
        """The audit that was saved there."""
        return cls._parse_dict(read_json(path, AUDIT), f"the file {os.fspath(path)!r}")


OWN_FORM = ("report", "lines")


def _line_to_dict(line: AuditLine) -> dict[str, Any]:
    changes = {kind: vars(change) for kind, change in line.changes.items()}
    found: dict[str, Any] = encode_nonfinite(
        {"claims": line.claims, "logarithmic": line.logarithmic, "changes": changes}
    )
    return found


def _parse_line(given: Mapping[str, Any], reading: Reading) -> AuditLine:
    found = decode_nonfinite(given)
    changes = {kind: _parse_change(change) for kind, change in found.pop("changes").items()}
    return AuditLine(reading, tuple(found.pop("claims")), changes=changes, **found)


def _parse_change(given: Mapping[str, Any]) -> Change:
    # Other programs write 5.0 as 5.
    numbers = {key: _as_float(given[key]) for key in ("smallest", "largest", "moved")}
    return Change(**{**given, **numbers, "values": tuple(map(_as_float, given["values"]))})


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value
