"""One number about a network, and all that is needed to judge it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from saltflat.errors import ReportError
from saltflat.report.plain import decode_nonfinite, encode_nonfinite, to_plain_types
from saltflat.report.schema import EACH, check_structure


@dataclass(frozen=True, eq=False)
class Reading:
    """One measure of one network.

    Two readings are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        name: the key in the report, ``"rho"`` or, with options, ``"rho(axis='row')"``.
        value: the measure of the whole network; nan where it is undefined, with the reason in the notes.
        layers: what each parameter contributes, by parameter name; empty where the measure has no parts.
        units: the same per unit of a layer, where that is defined.
        stderr: value +- 1.96 stderr is a 95 % interval; None where nothing is random.
        layer_stderr: the same for each layer.
        sampling_stderr: standard error over the choice of the examples: the data is taken as a random sample, and
            value +- 1.96 sampling_stderr as a 95 % interval for what other samples of this size give. 0 for what does
            not depend on the data, None where it is not known.
        layer_sampling_stderr: the same for each layer.
        without_group: the value with one group of the examples left out at a time, see :mod:`saltflat.sampling`.
        exact: False for an estimate, a bound or the result of a search.
        converged: False where a solver stopped before it was done.
        residual: how far that solver was from its end, where there is one.
        notes: what a reader should know besides.
        details: further results, such as minimising scales; numbers, texts, lists and mappings.

    Example:
        >>> Reading("trace", 3.0, layers={"0.weight": 1.0, "2.weight": 2.0}).layers["2.weight"]
        2.0
    """

    name: str
    value: float
    layers: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    stderr: float | None = None
    layer_stderr: Mapping[str, float] = field(default_factory=dict)
    sampling_stderr: float | None = None
    layer_sampling_stderr: Mapping[str, float] = field(default_factory=dict)
    without_group: tuple[float, ...] = field(default=(), repr=False)
    exact: bool = True
    converged: bool = True
    residual: float | None = None
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Tensors and numpy numbers become Python's, so that a reading holds no memory of a device and can be written.
        tidy: dict[str, Any] = {
            "value": float(self.value),
            "layers": {str(name): float(value) for name, value in self.layers.items()},
            "units": {str(name): tuple(float(value) for value in values) for name, values in self.units.items()},
            "stderr": None if self.stderr is None else float(self.stderr),
            "layer_stderr": {str(name): float(value) for name, value in self.layer_stderr.items()},
            "sampling_stderr": None if self.sampling_stderr is None else float(self.sampling_stderr),
            "layer_sampling_stderr": {str(name): float(each) for name, each in self.layer_sampling_stderr.items()},
            "without_group": tuple(float(value) for value in self.without_group),
            "exact": bool(self.exact),
            "converged": bool(self.converged),
            "residual": None if self.residual is None else float(self.residual),
            "notes": (self.notes,) if isinstance(self.notes, str) else tuple(str(note) for note in self.notes),
            "details": to_plain_types(self.details, f"the details of {self.name!r}"),
        }
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Reading) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.report.plain``."""
        return {
            each.name: encode_nonfinite(getattr(self, each.name))
            for each in fields(self)
            if not _is_unknown(self, each.name)
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Reading:
        """The reading that ``to_dict`` was called on."""
        try:
            values = {key: decode_nonfinite(value) for key, value in given.items()}
            for key, form in NUMBERS.items():
                if key in values:
                    check_structure(values[key], form, repr(key))
            found = cls(**values)
            errors = [found.stderr, found.sampling_stderr, *found.layer_stderr.values()]
            if any(each is not None and each < 0 for each in [*errors, *found.layer_sampling_stderr.values()]):
                raise ValueError("a standard error is negative")
            if not isinstance(found.name, str) or not isinstance(found.details, dict):
                raise TypeError("the name is no text, or the details are no mapping")
            return found
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as problem:
            raise ReportError(
                f"Got a reading that cannot be understood ({problem}). Want what Reading.to_dict gives. "
                "Do: measure again, or take the file from a backup."
            ) from problem


# What the numbers of a reading are in a file.
_BY_LAYER = {EACH: float}
NUMBERS = {
    "value": float,
    "layers": _BY_LAYER,
    "stderr": (float, None),
    "layer_stderr": _BY_LAYER,
    "sampling_stderr": (float, None),
    "layer_sampling_stderr": _BY_LAYER,
    "exact": bool,
    "converged": bool,
    "residual": (float, None),
}
# Files written before these were known do without them.
LATER = ("sampling_stderr", "layer_sampling_stderr", "without_group")


def _is_unknown(reading: Reading, name: str) -> bool:
    return name in LATER and getattr(reading, name) in (None, {}, ())
