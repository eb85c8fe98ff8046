"""The effect of each setting of a study on measures, losses, errors and gaps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from saltflat._late import load_later
from saltflat.errors import OptionError, StudyError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import build_frame
from saltflat.results.json_codec import JsonValue, decode_nonfinite, encode_nonfinite
from saltflat.results.text import format_count, format_setting, join_words
from saltflat.studies.grid import is_same_value, split_axis_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LOWER, HIGHER, UNCLEAR, TOO_FEW = "lower", "higher", "no clear difference", "too few pairs"
VERDICTS = (LOWER, HIGHER, UNCLEAR, TOO_FEW)
# The share of comparisons without any effect that are called lower or higher.
LEVEL = 0.05


@dataclass(frozen=True)
class Quantity:
    """A number that every run has.

    Attributes:
        name: the name of the measure, or ``train_loss``, ``test_loss``, ``train_error``, ``test_error``, ``gap_loss``,
            ``gap_error``.
        kind: ``"measure"``, ``"loss"`` or ``"error"``; a gap has the kind of its parts.
        has_ratio: whether it is compared by ratios: a measure or a loss that is positive in all runs.
        smaller: what a smaller value says of the minimum; empty for losses, errors and measures of your own.
        is_invariant: whether rescaling units of the network leaves it unchanged.
    """

    name: str
    kind: str
    has_ratio: bool
    smaller: str = ""
    is_invariant: bool = False


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval.

    Attributes:
        value: the mean; nan if there is no number.
        low, high: the ends of its interval; nan if there are too few numbers.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        """Return whether the interval is known."""
        return not (math.isnan(self.low) or math.isnan(self.high))


@dataclass(frozen=True)
class Mean:
    """The mean of one quantity over the runs with one value of a setting.

    Attributes:
        estimate: the mean; the geometric mean of quantities that are compared by ratios.
        runs: the number of runs in it.
        unknown: the number of runs left out of it, because the quantity is unknown or not finite.
    """

    estimate: Estimate
    runs: int
    unknown: int


@dataclass(frozen=True)
class Change:
    """The change of one quantity from the reference to another value of a setting.

    Attributes:
        verdict: ``"lower"`` or ``"higher"`` than with the reference, if the interval of the ratio (of the difference,
            without a ratio) says so; ``"no clear difference"``; or ``"too few pairs"``.
        pairs: the number of pairs of runs that differ in this setting alone.
        configurations, seeds: the number of different ones among the pairs.
        unknown: the number of pairs left out, because the quantity is unknown or not finite in one of the runs.
        difference: the mean over the pairs of the value minus the reference.
        ratio: the geometric mean over the pairs of the value divided by the reference; None without ratios.
        p: the p-value that belongs to the verdict; nan with too few pairs.
        p_holm: the same after Holm's correction for all comparisons that were made together.
    """

    verdict: str
    pairs: int
    configurations: int
    seeds: int
    unknown: int
    difference: Estimate
    ratio: Estimate | None
    p: float
    p_holm: float

    @property
    def estimate(self) -> Estimate:
        """The estimate that the verdict is about: the ratio, or the difference if there is none."""
        return self.difference if self.ratio is None else self.ratio

    @property
    def is_sure(self) -> bool:
        """Return whether the verdict still is lower or higher after the correction for all comparisons."""
        return self.verdict in (LOWER, HIGHER) and self.p_holm < LEVEL


@dataclass(frozen=True)
class ValueEffects:
    """One value of a setting: its means, and its changes from the reference.

    Attributes:
        value: the value; a list if several settings vary together.
        planned: the number of runs with this value in the grid.
        runs: the number of these that are compared.
        left_out: the number of the others, by reason.
        pairs: the number of runs with a partner: a run with the reference and the same other settings and seed.
        means: by the name of the quantity.
        changes: by the name of the quantity; empty for the reference.
    """

    value: Any
    planned: int
    runs: int
    left_out: Mapping[str, int]
    pairs: int
    means: Mapping[str, Mean]
    changes: Mapping[str, Change]

    @property
    def label(self) -> str:
        """The value as text."""
        return format_setting(self.value)


@dataclass(frozen=True)
class AxisEffects:
    """One axis of the grid: a setting, or several that vary together.

    Attributes:
        name: the name of the axis, ``"lr"`` or ``"batch_size, lr"``.
        reference: the place among the values of the one that others are compared with.
        configurations: the number of combinations of the other settings in the grid.
        seeds: the number of seeds in the grid.
        values: in the order of the axis.
    """

    name: str
    reference: int
    configurations: int
    seeds: int
    values: tuple[ValueEffects, ...]

    @property
    def base(self) -> ValueEffects:
        """The value that others are compared with."""
        return self.values[self.reference]

    @property
    def others(self) -> tuple[ValueEffects, ...]:
        """The values that are compared with the reference."""
        return tuple(each for place, each in enumerate(self.values) if place != self.reference)

    def describe(self, value: ValueEffects) -> str:
        """Return a value as text; of settings that vary together, those that differ from the reference, by name."""
        names = split_axis_names(self.name)
        if len(names) == 1:
            return value.label
        parts = list(zip(names, value.value, self.base.value, strict=True))
        told = [(name, each) for name, each, base in parts if value is self.base or not is_same_value(each, base)]
        return ", ".join(f"{name} {format_setting(each)}" for name, each in told)

    def __getitem__(self, value: JsonValue) -> ValueEffects:
        """Return the effects of a value, which may be given as its text."""
        return self.values[find_value(self.name, [each.value for each in self.values], value)]


def find_value(axis: str, values: list[Any], wanted: JsonValue) -> int:
    """Return the place of a value on an axis; it may be given as its text.

    Example:
        >>> find_value("lr", [0.1, 0.2], 0.2), find_value("optimizer", ["sgd", "adam"], "adam")
        (1, 1)
    """
    labels = [format_setting(each) for each in values]
    for place, each in enumerate(values):
        if is_same_value(each, wanted):
            return place
    if isinstance(wanted, str):  # as in JSON and YAML: 20.0 is 20
        with suppress(ValueError):
            parsed = json.loads(f"[{wanted}]")
            same = [is_same_value(each, parsed if len(parsed) > 1 else parsed[0]) for each in values]
            if any(same):
                return same.index(True)
    plain = [label.replace(" ", "") for label in labels]
    if isinstance(wanted, str) and wanted.replace(" ", "") in plain:
        return plain.index(wanted.replace(" ", ""))
    if " " in axis:
        labels = [f"({label})" for label in labels]
    raise make_unknown_name_error(f"value of {axis}", format_setting(wanted), labels)


SCHEMA = "saltflat.effects/1"


@dataclass(frozen=True, eq=False, repr=False)
class Effects(Displayable):
    """How every quantity changes with every setting that the grid varies; prints as a table per setting.

    Two are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        axes: by name.
        quantities: by name, measures first.
        runs: the number of runs that are compared.
        left_out: the number of the others, by reason.
        warnings: reasons to doubt the comparison.
        notes: how it was made.
    """

    renderer = ("effects", "EffectsTables", "")

    axes: Mapping[str, AxisEffects]
    quantities: Mapping[str, Quantity]
    runs: int
    left_out: Mapping[str, int]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def find_axis(self, name: str) -> str:
        """Return the name of the axis that a setting belongs to; settings that vary together share one."""
        known = {each: axis for axis in self.axes for each in (*split_axis_names(axis), axis)}
        if name not in known:
            raise make_unknown_name_error("axis", name, known)
        return known[name]

    def __getitem__(self, name: str) -> AxisEffects:
        return self.axes[self.find_axis(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Effects) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Effects of {format_count(len(self), 'setting')} on {self.runs} runs; print() shows them>"

    def plot(self, axis: str | None = None) -> Figure:
        """Return a ``matplotlib`` Figure of one axis: ratios of measures and losses, and differences of the rest.

        Args:
            axis: the name of the axis; needed if there are several.
        """
        if axis is None and len(self.axes) != 1:
            got = f"{len(self.axes)} axes ({join_words(list(self.axes))})" if self.axes else "a study without any"
            hint = f"Try axis={next(iter(self.axes))!r}." if self.axes else "Try a study whose grid varies a setting."
            raise OptionError(f"Expected one axis to plot, but got {got}. {hint}")
        figure: Figure = load_later("render.effects_plot").draw_effects(
            self, next(iter(self)) if axis is None else axis
        )
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Return strict JSON; numbers that are not finite are encoded, see ``saltflat.results.json_codec``."""
        encoded: dict[str, Any] = encode_nonfinite(asdict(self))
        return {"schema": SCHEMA, **encoded}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Effects:
        """Return the effects that ``to_dict`` was called on."""
        try:
            if given["schema"] != SCHEMA:
                raise ValueError(f"the schema is {given['schema']!r}, not {SCHEMA!r}")
            parts = {name: decode_nonfinite(value) for name, value in given.items() if name != "schema"}
            parts["axes"] = {name: _decode_axis(each) for name, each in parts["axes"].items()}
            parts["quantities"] = {name: Quantity(**each) for name, each in parts["quantities"].items()}
            found = cls(**{**parts, "warnings": tuple(parts["warnings"]), "notes": tuple(parts["notes"])})
            if found.to_dict() != given or not isinstance(found.runs, int):
                raise TypeError("a field has a value of another kind")
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
            raise StudyError(
                f"Expected the output of Effects.to_dict, but got effects that cannot be understood ({problem}). Try "
                "computing them again."
            ) from problem
        return found

    def to_frame(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per axis, value and quantity; changes of references are nan."""
        rows = [
            _make_row(axis, value, name)
            for axis in self.axes.values()
            for value in axis.values
            for name in self.quantities
        ]
        return build_frame(rows, COLUMNS)


ESTIMATES = ("mean", "difference", "ratio")
COLUMNS = [
    *("axis", "value", "is_reference", "quantity", "runs", "pairs", "unknown"),
    *(f"{name}{end}" for name in ESTIMATES for end in ("", "_low", "_high")),
    *("p", "p_holm", "verdict"),
]


def _make_row(axis: AxisEffects, value: ValueEffects, name: str) -> dict[str, Any]:
    mean, change = value.means[name], value.changes.get(name)
    row: dict[str, Any] = {
        "axis": axis.name,
        "value": value.label,
        "is_reference": change is None,
        "quantity": name,
        "runs": mean.runs,
    }
    found: dict[str, Estimate | None] = {"mean": mean.estimate}
    if change is not None:
        row |= {each: getattr(change, each) for each in ("pairs", "unknown", "p", "p_holm", "verdict")}
        found |= {"difference": change.difference, "ratio": change.ratio}
    for what in ESTIMATES:
        each = found.get(what) or Estimate(math.nan)
        row |= {what: each.value, f"{what}_low": each.low, f"{what}_high": each.high}
    return row


def _decode_axis(given: Mapping[str, Any]) -> AxisEffects:
    return AxisEffects(**{**given, "values": tuple(map(_decode_value, given["values"]))})


def _decode_value(given: Mapping[str, Any]) -> ValueEffects:
    means = {name: Mean(**{**each, "estimate": Estimate(**each["estimate"])}) for name, each in given["means"].items()}
    return ValueEffects(
        **{**given, "means": means, "changes": {name: _decode_change(each) for name, each in given["changes"].items()}}
    )


def _decode_change(given: Mapping[str, Any]) -> Change:
    if given["verdict"] not in VERDICTS:
        raise ValueError(f"the verdict is {given['verdict']!r}")
    ratio = None if given["ratio"] is None else Estimate(**given["ratio"])
    return Change(**{**given, "difference": Estimate(**given["difference"]), "ratio": ratio})
