"""Readings, and the report of all that was measured of one network."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat._late import load_later
from saltflat.errors import OptionError, ReportError, UnknownNameError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import REPORT, build_frame, build_frame_rows, check_schema, read_json, write_json
from saltflat.results.json_codec import (
    CERTIFICATE,
    EACH,
    LEGEND,
    MAPPING,
    SAMPLE,
    check_structure,
    decode_nonfinite,
    encode_key,
    encode_nonfinite,
    to_plain_types,
)
from saltflat.results.text import make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        without_group: the value with one group of the examples left out at a time, see :mod:`saltflat.engine.sampling`.
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
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.results.json_codec``."""
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
                f"Expected what Reading.to_dict gives, but got a reading that cannot be understood ({problem}). Try "
                "measuring again, or taking the file from a backup."
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
ADDED_LATER = ("sampling_stderr", "layer_sampling_stderr", "without_group")


def _is_unknown(reading: Reading, name: str) -> bool:
    return name in ADDED_LATER and getattr(reading, name) in (None, {}, ())


# Files written before these were known do without them.
LATER = ("accuracy", "gradient_norm", "gradient_agreement", "sample")


@dataclass(frozen=True, eq=False, repr=False)
class Report(Displayable, Mapping[str, Reading]):
    """Readings by the name of the measure, with everything needed to judge, repeat and compare them.

    Two reports are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        readings: what the mapping shows.
        left_out: measures that could not be taken, and why.
        legend: for each measure its meaning, formula, what it is invariant to, reference, and what smaller means.
        model: class name and number of parameters.
        examples: how many examples were seen.
        loss: the mean loss over them.
        settings: how it was measured.
        versions: of saltflat, torch, numpy, scipy and python.
        device: where it was measured.
        seconds: how long it took.
        seconds_by_step: the same, by what was being done.
        certificate: whether the Gauss-Newton blocks are the Hessian's; None where that was not asked.
        notes: what a reader should know besides.
        created: when, ISO time in UTC.
        accuracy: the fraction of targets that the network gets right; None where there are no classes.
        gradient_norm: length of the gradient of the mean loss over the measured parameters; 0 at a minimum.
        gradient_agreement: the squared length of the mean gradient over the mean squared length of single examples'
            gradients: about 1 / examples at a minimum of this data, 1 if all examples pull the same way.
        sample: what is known of the examples as a sample: a ``fingerprint`` that is the same for the same examples in
            the same order, and the sizes of the ``groups`` that standard errors over examples come from.
    """

    renderer = ("report", "ReportTable", "render_report_html")

    readings: Mapping[str, Reading]
    left_out: Mapping[str, str]
    legend: Mapping[str, Mapping[str, Any]]
    model: str
    examples: int
    loss: float
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    seconds: float
    seconds_by_step: Mapping[str, float]
    certificate: Mapping[str, Any] | None
    notes: tuple[str, ...]
    created: str
    accuracy: float | None = None
    gradient_norm: float | None = None
    gradient_agreement: float | None = None
    sample: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tidy: dict[str, Any] = {
            "readings": dict(self.readings),
            "left_out": {str(name): str(reason) for name, reason in self.left_out.items()},
            "legend": to_plain_types(self.legend, "the legend"),
            "model": str(self.model),
            "examples": int(self.examples),
            "loss": float(self.loss),
            "settings": to_plain_types(self.settings, "the settings"),
            "versions": {str(name): str(version) for name, version in self.versions.items()},
            "device": str(self.device),
            "seconds": float(self.seconds),
            "seconds_by_step": {str(step): float(value) for step, value in self.seconds_by_step.items()},
            "certificate": to_plain_types(self.certificate, "the certificate"),
            "notes": (self.notes,) if isinstance(self.notes, str) else tuple(str(note) for note in self.notes),
            "created": str(self.created),
            **{name: None if (value := getattr(self, name)) is None else float(value) for name in LATER[:-1]},
            "sample": to_plain_types(self.sample, "the sample"),
        }
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

    def __getitem__(self, name: str) -> Reading:
        key = normalize_measure_name(name, self.readings)
        if key in self.readings:
            return self.readings[key]
        raise make_missing_measure_error(key, self.left_out, self.readings)

    def get(self, name: str, default: Any = None, /) -> Any:
        return self.readings.get(normalize_measure_name(name, self.readings), default)

    def __contains__(self, name: object) -> bool:
        return normalize_measure_name(name, self.readings) in self.readings

    def __iter__(self) -> Iterator[str]:
        return iter(self.readings)

    def __len__(self) -> int:
        return len(self.readings)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Report) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        model = make_printable(self.model)
        return f"<Report of {model}: {len(self)} measures on {self.examples} examples; print() shows it>"

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.results.json_codec``."""
        parts = {
            each.name: encode_nonfinite(getattr(self, each.name))
            for each in fields(self)
            if each.name != "readings" and (each.name not in LATER or getattr(self, each.name) not in (None, {}))
        }
        readings = {encode_key(name): reading.to_dict() for name, reading in self.items()}
        return {"schema": REPORT.schema, "readings": readings, **parts}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Report:
        """The report that ``to_dict`` was called on."""
        return cls._parse_dict(given, "a mapping")

    @classmethod
    def _parse_dict(cls, given: Mapping[str, Any], source: str) -> Report:
        check_schema(given, source)
        try:
            parts = {key: decode_nonfinite(value) for key, value in given.items() if key not in ("schema", "readings")}
            names = {name.removeprefix("$"): reading for name, reading in given["readings"].items()}
            report = cls({name: Reading.from_dict(reading) for name, reading in names.items()}, **parts)
            check_structure(report.legend, LEGEND, "the legend")
            check_structure(report.settings, MAPPING, "the settings")
            check_structure(report.certificate, (CERTIFICATE, None), "the certificate")
            check_structure(report.sample, SAMPLE, "the sample")
            if not all(size > 0 for size in report.sample.get("groups", [])):
                raise ValueError("a group of the sample is empty")
            # Reading is lenient (bool("no") is True): what does not come out again as it went in was not written by us.
            if report.to_dict() != given:
                raise TypeError("a field has a value of another kind")
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
            # A reading that is broken has said so in a sentence of its own; what counts is why.
            why = problem.__cause__ if isinstance(problem, ReportError) and problem.__cause__ else problem
            raise ReportError(
                f"Expected what Report.to_dict gives, but got {source}, a report that cannot be understood "
                f"({type(why).__name__}: {why}). Try measuring again, or taking the file from a backup."
            ) from problem
        return report

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON and give the path back; a file that was there is replaced, whole or not at all."""
        return write_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """The report that was saved there."""
        return cls._parse_dict(read_json(path), f"the file {os.fspath(path)!r}")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one page for a browser, which loads nothing, and give the path back."""
        html = load_later("render.html")  # not needed to measure
        written: Path = html.write_page(html.render_report_page(self), path)
        return written

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame`` with one row per measure and layer; the whole network is the layer ``""``."""
        columns = ["measure", "layer", "value", "stderr", "exact", "converged"]
        return build_frame(build_frame_rows(self.values()), columns)

    def plot(self, names: str | Sequence[str] | None = None) -> Any:
        """A ``matplotlib`` Figure, one panel per measure with a bar per layer; nothing is shown or kept.

        Bars are on a logarithmic axis where their values are positive and span more than two decades.
        """
        wanted = list(self) if names is None else parse_measure_names(names)
        figure: Figure = load_later("render.plots").draw_readings(
            {name: {"": self[name]} for name in wanted}, self.model
        )
        return figure


def parse_measure_names(names: str | Sequence[str]) -> list[str]:
    """One or several names of measures as a list."""
    listed = [names] if isinstance(names, str) or not isinstance(names, Sequence) else list(names)
    if not all(isinstance(name, str) for name in listed):
        raise OptionError(f"Expected a measure or a list of them, but got names={names!r}. Try ['rho'].")
    return listed


def normalize_measure_name(name: Any, taken: Iterable[str]) -> Any:
    """The name of a measure as readings have it: however its options are written, and without the usual ones."""
    if not isinstance(name, str):
        return name if isinstance(name, Hashable) else repr(name)
    if name in taken:
        return name
    return load_later("measures.registry").get_measure_key(name)


def make_missing_measure_error(name: str, left_out: Mapping[str, str], taken: Iterable[str]) -> UnknownNameError:
    """The error for a measure that has no reading: why it was left out, or the nearest name that has one."""
    if name not in left_out:
        return make_unknown_name_error("measure", name, taken)
    return UnknownNameError(
        f"Got the measure {name!r}, which was left out: {left_out[name]} "
        f"Want one that was taken ({', '.join(taken) or 'there is none'}). Do: remove the reason and measure again."
    )
