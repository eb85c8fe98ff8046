"""The result of an audit: how much every measure changed, and whether it claims to be invariant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saltflat._late import load_later
from saltflat.audit.change import BROKEN, Change, check_audit, compute_decades
from saltflat.results.display import Displayable
from saltflat.results.files import AUDIT, JsonFile
from saltflat.results.json_codec import JsonValue, decode_nonfinite, encode_key, encode_nonfinite, to_plain_types
from saltflat.results.report import MeasureMapping, Reading, Report
from saltflat.results.text import format_count, make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class AuditLine:
    """One measure under all draws.

    Attributes:
        reading: the reading of the network itself.
        claims: the symmetries that the measure claims to be invariant to.
        logarithmic: whether differences matter, not ratios.
        changes: by kind of rescaling; only kinds that the network has.
    """

    reading: Reading
    claims: tuple[str, ...]
    logarithmic: bool
    changes: Mapping[str, Change]

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict on each kind of rescaling."""
        return {kind: change.verdict for kind, change in self.changes.items()}

    @property
    def values(self) -> dict[str, tuple[float | None, ...]]:
        """The measure after each draw; nan where undefined, None where the draw failed."""
        return {kind: change.values for kind, change in self.changes.items()}

    def compute_draw_decades(self, kind: str) -> list[float]:
        """Return by how many powers of ten each draw multiplied the measure.

        It is nan where a ratio has no meaning and infinite from or to 0. For a logarithmic measure it is about the
        quantity whose logarithm it is.
        """
        return [
            compute_decades(self.reading.value, value, self.logarithmic)
            for value in self.changes[kind].values
            if value is not None
        ]

    def __repr__(self) -> str:
        verdicts = "; ".join(f"{kind} {verdict}" for kind, verdict in self.verdicts.items())
        return f"<AuditLine of {make_printable(self.reading.name)}: {verdicts or 'no draws'}>"


@dataclass(frozen=True, eq=False, repr=False)
class Audit(Displayable, JsonFile, MeasureMapping[AuditLine]):
    """The effect of random rescalings on every measure, by the name of the measure.

    Two audits are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        report: the report of the network itself, measured in float64.
        lines: the entries of the mapping.
        scales: by kind of rescaling, the number of independent ones that the network has.
        obstacles: operations that prevent rescaling: ``operation``, ``where``, ``line``, and whether it is ``known``.
        failed: by kind, the draws that could not be measured, and why.
        draws: the number of rescalings of each kind.
        spread: the standard deviation of the logarithms of the factors.
        seed: draw i of a kind is ``saltflat.rescale(model, example, seed=seed + i, spread=spread, kind=kind)``, in
            float64.
        tolerance: the largest relative change that counts as none.
        seconds: the time it took.
        notes: remarks for the reader.
        created: the time in UTC, in ISO format.
    """

    renderer = ("audit", "AuditTable", "render_audit_html")
    file_format = AUDIT

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
        self._convert_fields(
            lines=dict(self.lines),
            scales={str(kind): int(count) for kind, count in self.scales.items()},
            obstacles=tuple(to_plain_types(each, "the obstacles") for each in self.obstacles),
            failed={kind: {str(k): str(why) for k, why in draws.items()} for kind, draws in self.failed.items()},
            draws=int(self.draws),
            spread=float(self.spread),
            seed=int(self.seed),
            tolerance=float(self.tolerance),
        )

    @property
    def holds(self) -> bool:
        """Whether no measure moved that claims to be invariant."""
        return not self.broken_claims

    @property
    def broken_claims(self) -> list[str]:
        """The measures that moved though they claim to be invariant."""
        return [name for name, line in self.items() if BROKEN in line.verdicts.values()]

    @property
    def _entries(self) -> Mapping[str, AuditLine]:
        return self.lines

    @property
    def _reasons(self) -> Mapping[str, str]:
        return self.report.left_out

    def __repr__(self) -> str:
        size = f"{format_count(len(self), 'measure')}, {format_count(self.draws, 'draw')}"
        return f"<Audit of {make_printable(self.report.model)}: {size}; print() shows it>"

    def plot(self) -> Figure:
        """Return a ``matplotlib`` Figure with a row per measure and a dot per draw, at the factor it moved by."""
        figure: Figure = load_later("render.audit_plot").draw_audit(self)
        return figure

    def _encode_parts(self) -> dict[str, Any]:
        lines = {encode_key(name): _line_to_dict(line) for name, line in self.items()}
        return {"report": self.report.to_dict(), "lines": lines, "holds": self.holds}

    @classmethod
    def _decode_parts(cls, given: dict[str, Any]) -> dict[str, Any]:
        report, holds = Report.from_dict(given.pop("report")), given.pop("holds")
        names = {name.removeprefix("$"): line for name, line in given.pop("lines").items()}
        lines = {name: _parse_line(line, report[name]) for name, line in names.items()}
        broken = any(BROKEN in line.verdicts.values() for line in lines.values())
        if holds is not (not broken):
            raise ValueError(f"holds is {holds!r}, which the verdicts contradict")
        return {"report": report, "lines": lines}

    def _check_content(self) -> None:
        check_audit(self)


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


def _as_float(value: JsonValue) -> Any:
    return float(value) if type(value) is int else value
