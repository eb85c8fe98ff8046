"""A bound on the error of a network on new data, with all its terms and assumptions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf, isclose, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from saltflat._late import load_later
from saltflat.errors import make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import BOUND, JsonFile
from saltflat.results.json_codec import ANY, EACH, MAPPING, check_structure, to_plain_types
from saltflat.results.text import format_number, make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Whether a bound holds with the stated probability, or only looks like one that does.
BoundKind: TypeAlias = Literal["valid", "heuristic"]


@dataclass(frozen=True)
class Assumption:
    """A condition under which a bound holds.

    Attributes:
        text: the condition, as a sentence.
        met: True or False if it was checked, None if it cannot be checked by a program.
        evidence: what was checked, and what was found.
    """

    text: str
    met: bool | None = None
    evidence: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Bound(Displayable, JsonFile):
    """An upper bound on the risk of a network on new data: with probability 1 - delta, the risk is at most ``value``.

    ``float(bound)`` is the value.

    Attributes:
        name: of the bound.
        value: the bound; above 1 if it is as large as that.
        quantity: whose risk is bounded, as the subject of a sentence.
        loss: the loss in [0, 1] whose mean is the risk: ``"error"`` or ``"clipped_cross_entropy"``.
        delta: the probability with which the bound may fail.
        terms: what it is computed from, by name, in the order of the computation.
        assumptions: the conditions under which it holds.
        chance: the risk of guessing, above which a bound says nothing.
        reference: key of the paper.
        formula: in words and symbols.
        kind: ``"valid"`` or ``"heuristic"``.
        examples: number of examples the bound uses.
        details: further results: numbers, strings, lists and mappings.
        notes: remarks for the reader.
        model: class name and number of parameters; empty for a bound that was computed from numbers.
        settings: the options it was computed with.
        versions: of saltflat, torch, numpy and python.
        seconds: the time it took.
        created: the time in UTC, in ISO format.
    """

    renderer = ("bound", "BoundRenderable", "format_bound_html")
    file_format = BOUND

    name: str
    value: float
    quantity: str
    loss: str
    delta: float
    terms: Mapping[str, float]
    assumptions: tuple[Assumption, ...]
    chance: float
    reference: str
    formula: str
    kind: BoundKind
    examples: int
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    created: str = ""

    def __post_init__(self) -> None:
        self._convert_fields(
            value=float(self.value),
            loss=self.loss,  # a name here, the mean loss in other results
            delta=float(self.delta),
            terms={str(name): float(value) for name, value in self.terms.items()},
            assumptions=tuple(self.assumptions),
            chance=float(self.chance),
            details=to_plain_types(self.details, f"the details of {self.name!r}"),
        )

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"<Bound {make_printable(self.name)}: {format_number(self.value)}; print() shows it>"

    @property
    def is_vacuous(self) -> bool:
        """Whether the bound says nothing: it is not below the risk of guessing, or it is undefined."""
        return not self.value < self.chance

    @property
    def is_valid(self) -> bool:
        """Whether the bound is no heuristic, and no assumption was found to be violated."""
        return self.kind == "valid" and all(each.met is not False for each in self.assumptions)

    def _encode_parts(self) -> dict[str, Any]:
        return {
            "assumptions": [{"text": e.text, "met": e.met, "evidence": e.evidence} for e in self.assumptions],
        }

    @classmethod
    def _decode_parts(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"assumptions": tuple(Assumption(**each) for each in given.pop("assumptions"))}

    def _check_content(self) -> None:
        check_structure(self.settings, MAPPING, "the settings")
        check_structure(self.details, {EACH: ANY}, "the details")
        for name in ("name", "quantity", "loss", "reference", "formula"):
            check_structure(getattr(self, name), str, f"the {name}")
        for each in self.assumptions:
            check_structure([each.text, each.evidence], [str], "an assumption")
            check_structure(each.met, (bool, None), "whether an assumption is met")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta is {self.delta}")
        if not 0 <= self.examples < 2**63 or not 0 <= self.seconds < inf:
            raise ValueError(f"there are {self.examples} examples and {self.seconds} seconds")
        if not 0 < self.chance < inf:
            raise ValueError(f"the risk of guessing is {self.chance}")
        if not self.assumptions:
            raise ValueError("there are no assumptions")
        parts = self.details.get("parts")
        if isinstance(parts, list) and isfinite(self.value):
            total = fsum(self.terms[name] for name in parts)
            if not isclose(total, self.value, rel_tol=1e-6):
                raise ValueError(f"the value is {self.value}, but its terms sum to {total}")
        if self.kind not in get_args(BoundKind):
            raise make_unknown_name_error("kind of bound", self.kind, get_args(BoundKind))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the bound as one self-contained HTML page and return the path."""
        html = load_later("render.html")
        written: Path = html.write_page(html.render_result_page(self, f"Bound: {self.name}"), path)
        return written

    def plot(self, others: Sequence[Bound] | Mapping[str, Bound] = ()) -> Figure:
        """Return a ``matplotlib`` Figure of this bound, and of others beside it, against the risk of guessing.

        Args:
            others: more bounds, or bounds by the names to print beside their bars.
        """
        if isinstance(others, Mapping):
            others = [replace(each, name=name) for name, each in others.items()]
        figure: Figure = load_later("render.bound").plot_bounds([self, *others])
        return figure
