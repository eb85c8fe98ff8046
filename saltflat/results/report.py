"""Readings of measures, and the report of everything that was measured on one network."""

from __future__ import annotations

import math
import os
import platform
import time
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from saltflat._late import load_later
from saltflat.errors import OptionError, ReportError, UnknownNameError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import REPORT, JsonFile, build_frame, build_frame_rows
from saltflat.results.json_codec import (
    CERTIFICATE,
    EACH,
    LEGEND,
    MAPPING,
    SAMPLE,
    JsonRecord,
    Structure,
    check_structure,
    decode_nonfinite,
    encode_key,
    to_plain_types,
)
from saltflat.results.text import format_quantity, make_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn


@dataclass(frozen=True, eq=False)
class Reading(JsonRecord):
    """One measure of one network.

    ``float(reading)`` is the value, and formats such as ``f"{reading:.3g}"`` apply to it. Two readings are equal when
    everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        name: the key in the report, ``"rho"`` or, with options, ``"rho(axis='row')"``.
        value: the measure of the whole network; nan where undefined, with the reason in the notes.
        layers: the contribution of each parameter, by name; empty if the measure is not a sum over layers.
        units: the contribution of each unit of a layer, where defined.
        stderr: standard error over random draws: value +- 1.96 stderr is a 95 % interval; None where nothing is random.
        layer_stderr: the same for each layer.
        sampling_stderr: standard error over the choice of examples, with the data taken as a random sample:
            value +- 1.96 sampling_stderr is a 95 % interval for other samples of this size. 0 for measures that do not
            depend on the data, None where unknown.
        layer_sampling_stderr: the same for each layer.
        without_group: the value with one group of the examples left out at a time, for paired comparisons.
        exact: False for an estimate, a bound or the result of a search.
        converged: False if a solver stopped early.
        residual: the residual of that solver, if there is one.
        notes: remarks for the reader.
        details: further results, such as minimizing scales: numbers, strings, lists and mappings.

    Example:
        >>> reading = Reading("trace", 3.0, layers={"0.weight": 1.0, "2.weight": 2.0}, stderr=0.25, exact=False)
        >>> reading.layers["2.weight"], float(reading), f"{reading:.3f}"
        (2.0, 3.0, '3.000')
        >>> print(reading)
        trace = 3.00 +- 0.25 (estimate)
    """

    # Files of earlier versions do not have these.
    optional_fields = ("sampling_stderr", "layer_sampling_stderr", "without_group")

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
        self._convert_fields(
            value=float(self.value),
            layers={str(name): float(value) for name, value in self.layers.items()},
            units={str(name): tuple(float(value) for value in values) for name, values in self.units.items()},
            stderr=None if self.stderr is None else float(self.stderr),
            layer_stderr={str(name): float(value) for name, value in self.layer_stderr.items()},
            sampling_stderr=None if self.sampling_stderr is None else float(self.sampling_stderr),
            layer_sampling_stderr={str(name): float(each) for name, each in self.layer_sampling_stderr.items()},
            without_group=tuple(float(value) for value in self.without_group),
            exact=bool(self.exact),
            converged=bool(self.converged),
            residual=None if self.residual is None else float(self.residual),
            details=to_plain_types(self.details, f"the details of {self.name!r}"),
        )

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def __str__(self) -> str:
        defined = not math.isnan(self.value)
        marks = ["estimate"] * (not self.exact) + ["not converged"] * (not self.converged)
        shown = f"{make_printable(self.name)} = {format_quantity(self.value, self.stderr)}"
        return f"{shown} ({', '.join(marks)})" if marks and defined else shown

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Reading:
        """Return the reading that ``to_dict`` was called on; raise a ReportError for anything else."""
        try:
            values = {key: decode_nonfinite(value) for key, value in given.items()}
            for key, structure in NUMBERS.items():
                if key in values:
                    check_structure(values[key], structure, repr(key))
            found = cls(**values)
            errors = [found.stderr, found.sampling_stderr, *found.layer_stderr.values()]
            if any(each is not None and each < 0 for each in [*errors, *found.layer_sampling_stderr.values()]):
                raise ValueError("a standard error is negative")
            if not isinstance(found.name, str) or not isinstance(found.details, dict):
                raise TypeError("the name is no text, or the details are no mapping")
            return found
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as problem:
            raise ReportError(
                f"Expected what Reading.to_dict returns, but got a reading that cannot be understood ({problem}). Try "
                "measuring again, or restoring the file from a backup."
            ) from problem


# The structure of the numbers of a reading in a file.
_BY_LAYER: dict[str, Structure] = {EACH: float}
NUMBERS: dict[str, Structure] = {
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
Entry = TypeVar("Entry")


class MeasureMapping(Mapping[str, Entry]):
    """A read-only mapping by the names of measures, whose options may be written in any form."""

    @property
    @abstractmethod
    def _entries(self) -> Mapping[str, Entry]:
        """The entries by canonical name."""

    @property
    def _reasons(self) -> Mapping[str, str]:
        """Why measures are missing, by name."""
        return {}

    def __getitem__(self, name: str) -> Entry:
        key = normalize_measure_name(name, self._entries)
        if key in self._entries:
            return self._entries[key]
        raise make_missing_measure_error(key, self._reasons, self._entries)

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return the entry of a measure, or the default."""
        return self._entries.get(normalize_measure_name(name, self._entries), default)

    def __contains__(self, name: object, /) -> bool:
        return normalize_measure_name(name, self._entries) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, eq=False, repr=False)
class Report(Displayable, JsonFile, MeasureMapping[Reading]):
    """Readings by the name of the measure, with everything needed to judge, repeat and compare them.

    Two reports are equal when everything in them is; an undefined value (nan) equals an undefined value.

    Attributes:
        readings: the entries of the mapping.
        left_out: measures that could not be computed, and why.
        legend: for each measure its meaning, formula, invariances, reference, and what a smaller value means.
        model: class name and number of parameters.
        examples: the number of examples.
        loss: the mean loss over them.
        settings: the options of the measurement.
        versions: of saltflat, torch, numpy, scipy and python.
        device: the device it ran on.
        seconds: the time it took.
        seconds_by_step: the time of each step.
        certificate: whether the Gauss-Newton blocks equal the Hessian's; None if that was not checked.
        notes: remarks for the reader.
        created: the time in UTC, in ISO format.
        accuracy: the fraction of correct predictions; None where there are no classes.
        gradient_norm: length of the gradient of the mean loss over the measured parameters; 0 at a minimum.
        gradient_agreement: the squared length of the mean gradient over the mean squared length of single examples'
            gradients: about 1 / examples at a minimum, 1 if all gradients agree.
        sample: a ``fingerprint`` of the examples in their order, and the sizes of the ``groups`` from which standard
            errors over examples are computed.
    """

    renderer = ("report", "ReportTable", "render_report_html")
    file_format = REPORT
    # Files of earlier versions do not have these.
    optional_fields = ("accuracy", "gradient_norm", "gradient_agreement", "sample")

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
        self._convert_fields(
            readings=dict(self.readings),
            left_out={str(name): str(reason) for name, reason in self.left_out.items()},
            legend=to_plain_types(self.legend, "the legend"),
            device=str(self.device),
            seconds_by_step={str(step): float(value) for step, value in self.seconds_by_step.items()},
            certificate=to_plain_types(self.certificate, "the certificate"),
            accuracy=None if self.accuracy is None else float(self.accuracy),
            gradient_norm=None if self.gradient_norm is None else float(self.gradient_norm),
            gradient_agreement=None if self.gradient_agreement is None else float(self.gradient_agreement),
            sample=to_plain_types(self.sample, "the sample"),
        )

    @property
    def _entries(self) -> Mapping[str, Reading]:
        return self.readings

    @property
    def _reasons(self) -> Mapping[str, str]:
        return self.left_out

    def __repr__(self) -> str:
        model = make_printable(self.model)
        return f"<Report of {model}: {len(self)} measures on {self.examples} examples; print() shows it>"

    def _encode_parts(self) -> dict[str, Any]:
        return {"readings": {encode_key(name): reading.to_dict() for name, reading in self.items()}}

    @classmethod
    def _decode_parts(cls, given: dict[str, Any]) -> dict[str, Any]:
        readings = given.pop("readings").items()
        return {"readings": {name.removeprefix("$"): Reading.from_dict(reading) for name, reading in readings}}

    def _check_content(self) -> None:
        check_structure(self.legend, LEGEND, "the legend")
        check_structure(self.settings, MAPPING, "the settings")
        check_structure(self.certificate, (CERTIFICATE, None), "the certificate")
        check_structure(self.sample, SAMPLE, "the sample")
        if not all(size > 0 for size in self.sample.get("groups", [])):
            raise ValueError("a group of the sample is empty")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML page and return the path."""
        html = load_later("render.html")  # not needed to measure
        written: Path = html.write_page(html.render_report_page(self), path)
        return written

    def to_frame(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row per measure and layer; the whole network is the layer ``""``."""
        columns = ["measure", "layer", "value", "stderr", "sampling_stderr", "exact", "converged"]
        return build_frame(build_frame_rows(self.values()), columns)

    def plot(self, names: str | Sequence[str] | None = None) -> Figure:
        """Return a ``matplotlib`` Figure with a panel per measure and a bar per layer.

        The axis is logarithmic where the values are positive and span more than two decades.
        """
        wanted = list(self) if names is None else parse_measure_names(names)
        figure: Figure = load_later("render.plots").draw_readings(
            {name: {"": self[name]} for name in wanted}, self.model
        )
        return figure


def describe_run(model: nn.Module, started: float, *packages: ModuleType) -> dict[str, Any]:
    """Return the fields of a result that say what was computed when: model, versions, seconds and created.

    Args:
        model: the model.
        started: the value of ``time.perf_counter()`` at the start.
        packages: the packages whose versions matter, besides saltflat and Python.
    """
    import saltflat  # at call time: this module is part of it

    versions = {each.__name__: str(each.__version__) for each in packages}
    return {
        "model": f"{type(model).__name__}, {sum(each.numel() for each in model.parameters()):,} parameters",
        "versions": {"saltflat": saltflat.__version__, **versions, "python": platform.python_version()},
        "seconds": time.perf_counter() - started,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def parse_measure_names(names: str | Sequence[str]) -> list[str]:
    """Return one or several names of measures as a list."""
    listed = [names] if isinstance(names, str) or not isinstance(names, Sequence) else list(names)
    if not all(isinstance(name, str) for name in listed):
        raise OptionError(f"Expected a measure or a list of them, but got names={names!r}. Try ['rho'].")
    return listed


def normalize_measure_name(name: Hashable, taken: Iterable[str]) -> Any:
    """Return the canonical name of a measure: options sorted and quoted, defaults left out."""
    if not isinstance(name, str):
        return name if isinstance(name, Hashable) else repr(name)
    if name in taken:
        return name
    return load_later("measures.registry").get_measure_key(name)


def make_missing_measure_error(name: str, left_out: Mapping[str, str], taken: Iterable[str]) -> UnknownNameError:
    """Return the error for a measure without a reading: why it was left out, or the closest name that has one."""
    if name in load_later("measures.registry").MEASURES and name not in left_out:
        return UnknownNameError(
            f"Expected a measure with a reading ({', '.join(taken) or 'there is none'}), but got {name!r}, which was "
            "not measured. Try adding it to measures=."
        )
    if name not in left_out:
        return make_unknown_name_error("measure", name, taken)
    return UnknownNameError(
        f"Expected a measure with a reading ({', '.join(taken) or 'there is none'}), but got {name!r}, which was left "
        f"out: {left_out[name]} Try removing that reason and measuring again."
    )
