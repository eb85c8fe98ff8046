"""How much of each measure's order of networks survives each change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from saltflat._late import load_later
from saltflat.errors import make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import build_frame
from saltflat.results.json_codec import encode_nonfinite
from saltflat.results.text import format_count
from saltflat.studies.effects.results import Estimate, Quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LESS, MORE, ALIKE, TOO_FEW = "less than the gap", "more than the gap", "no clear difference", "too few configurations"
SCHEMA = "saltflat.fragility/1"
COLUMNS = ["change", "quantity", "kind", "pairs", "runs", "tau", "tau_low", "tau_high", "lead", "lead_low", "lead_high"]
COLUMNS += ["verdict"]


@dataclass(frozen=True)
class Survival:
    """How much of the order of networks by one number survives a change.

    Attributes:
        tau: Kendall's tau-b between the orders before and after, over the pairs of values: 1 if the order is the same,
            0 if both are unrelated.
        lead: the same minus that of the gap.
        runs: the number of pairs of runs that are compared.
        verdict: ``"less than the gap"`` or ``"more than the gap"`` if the interval of the lead says so; ``"no clear
            difference"``; or ``"too few configurations"``.
    """

    tau: Estimate
    lead: Estimate
    runs: int
    verdict: str


@dataclass(frozen=True)
class ShiftSurvival:
    """One change: another value of a setting, another seed, or another measurement.

    Attributes:
        name: of the setting, ``"seed"``, or the name that the other measurement was given.
        kind: ``"setting"``, ``"seed"`` or ``"measurement"``.
        pairs: the number of pairs of values that are compared.
        configurations: the number of configurations of what is not changed.
        survivals: by the name of the quantity.
    """

    name: str
    kind: str
    pairs: int
    configurations: int
    survivals: Mapping[str, Survival]

    def __getitem__(self, quantity: str) -> Survival:
        if quantity not in self.survivals:
            raise make_unknown_name_error("quantity", quantity, self.survivals)
        return self.survivals[quantity]


@dataclass(frozen=True, eq=False, repr=False)
class Fragility(Displayable):
    """How much of every order of networks survives every change; prints as a table.

    Attributes:
        shifts: by name.
        quantities: by name; measures first, the gap last.
        gap: the name of the gap among the quantities.
        runs: the number of runs that are compared.
        left_out: the number of the others, by reason.
        warnings: reasons to doubt the comparison.
        notes: how it was made.
    """

    renderer = ("fragility", "FragilityTables", "")

    shifts: Mapping[str, ShiftSurvival]
    quantities: Mapping[str, Quantity]
    gap: str
    runs: int
    left_out: Mapping[str, int]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> ShiftSurvival:
        if name not in self.shifts:
            raise make_unknown_name_error("change", name, self.shifts)
        return self.shifts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shifts)

    def __len__(self) -> int:
        return len(self.shifts)

    def __repr__(self) -> str:
        return f"<Fragility under {format_count(len(self), 'change')} on {self.runs} runs; print() shows it>"

    def plot(self) -> Figure:
        """Return a ``matplotlib`` Figure with a panel per change: tau-b of each measure beside the gap's."""
        figure: Figure = load_later("render.fragility").draw_fragility(self)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Return strict JSON; numbers that are not finite are encoded, see ``saltflat.results.json_codec``."""
        encoded: dict[str, Any] = encode_nonfinite(asdict(self))
        return {"schema": SCHEMA, **encoded}

    def to_frame(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per change and quantity."""
        rows = []
        for shift in self.shifts.values():
            for name, each in shift.survivals.items():
                found = {"tau": each.tau, "lead": each.lead}
                numbers = {
                    what + end: number
                    for what, estimate in found.items()
                    for end, number in (("", estimate.value), ("_low", estimate.low), ("_high", estimate.high))
                }
                facts = {"quantity": name, "kind": self.quantities[name].kind, "pairs": shift.pairs, "runs": each.runs}
                rows.append({"change": shift.name, **facts, **numbers, "verdict": each.verdict})
        return build_frame(rows, COLUMNS)
