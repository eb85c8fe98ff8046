"""Compare reports: what differs by more than its errors, and which network is flatter."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from saltflat._late import load_later
from saltflat.errors import ReportError, make_unknown_name_error
from saltflat.results.caveats import find_doubts, find_reservations
from saltflat.results.display import Displayable
from saltflat.results.files import TOTAL, build_frame, build_frame_rows
from saltflat.results.json_codec import encode_nonfinite
from saltflat.results.report import (
    MeasureMapping,
    Reading,
    Report,
    make_missing_measure_error,
    normalize_measure_name,
    parse_measure_names,
)
from saltflat.results.text import format_number, join_words, make_printable
from saltflat.results.verdict import (
    ROUNDING,
    WIDTH,
    compute_difference,
    compute_difference_error,
    compute_ratio,
    find_flattest,
    format_answer,
    judge_difference,
)
from saltflat.validation import is_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Source = Report | str | os.PathLike[str]


@dataclass(frozen=True, repr=False)
class Contrast:
    """One measure in all the reports that have it.

    Attributes:
        name: the name of the measure.
        readings: by the label of the report.
        differences: the value of each report minus that of the first.
        ratios: the value of each report over that of the first; nan where that is zero.
        errors: the standard error of each difference, over examples and random draws; None where unknown.
        verdicts: ``different``, ``same`` (up to rounding), ``within errors``, ``not judged`` (an error is unknown) or
            ``undefined``, each against the first.
        invariant_to: the rescalings that leave the measure unchanged.
        logarithmic: whether differences matter, not ratios.
        flattest: the label of the flattest by this measure; None if none stands out or the measure cannot tell.
        sure: whether that holds beyond the errors; False if some are unknown.
    """

    name: str
    readings: Mapping[str, Reading]
    differences: Mapping[str, float]
    ratios: Mapping[str, float]
    errors: Mapping[str, float | None]
    verdicts: Mapping[str, str]
    invariant_to: tuple[str, ...]
    logarithmic: bool
    flattest: str | None
    sure: bool

    def __repr__(self) -> str:
        values = [f"{make_printable(label)} {format_number(each.value)}" for label, each in self.readings.items()]
        flatter = f"; {make_printable(self.flattest)} is flatter" if self.flattest and self.sure else ""
        return f"<Contrast of {self.name}: {', '.join([*values, *self.verdicts.values()])}{flatter}>"

    def compute_ratio_interval(self, label: str) -> tuple[float, float] | None:
        """Return the 99 % interval of a report's ratio to the first, as verdicts use it; None where it is not known.

        Verdicts are about differences: an interval without 1 is a significant difference.
        """
        error, first = self.errors.get(label), next(iter(self.readings.values())).value
        ratio = self.ratios.get(label, math.nan)
        if error is None or self.logarithmic or not first or not all(map(math.isfinite, (ratio, error, first))):
            return None
        width = WIDTH * error / abs(first)
        return ratio - width, ratio + width


@dataclass(frozen=True, repr=False)
class Comparison(Displayable, MeasureMapping[Contrast]):
    """Contrasts by the name of the measure, and reasons to doubt the comparison.

    Attributes:
        reports: by label; differences are from the first.
        contrasts: the entries of the mapping.
        paired: whether all reports saw the same examples, so that errors are those of paired differences.
        doubts: reasons for caution in sentences, the most important first.
    """

    renderer = ("comparison", "ComparisonTable", "render_comparison_html")

    reports: Mapping[str, Report]
    contrasts: Mapping[str, Contrast]
    doubts: tuple[str, ...]
    paired: bool

    @property
    def answer(self) -> str:
        """Which network is flatter, by the measures invariant to rescaling, in one sentence."""
        said, but = format_answer(self.contrasts.values()), find_reservations(self.reports)
        return f"{said} But {join_words(but)}." if but else said

    @property
    def _entries(self) -> Mapping[str, Contrast]:
        return self.contrasts

    def __repr__(self) -> str:
        return f"<Comparison of {make_printable(', '.join(self.reports))}: {len(self)} measures; print() shows it>"

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as strict JSON; nan and infinities are encoded, see ``saltflat.results.json_codec``."""
        contrasts = {
            name: {
                "values": {label: reading.value for label, reading in each.readings.items()},
                "stderr": {label: reading.stderr for label, reading in each.readings.items()},
                "differences": each.differences,
                "ratios": each.ratios,
                "errors": each.errors,
                "verdicts": each.verdicts,
                "invariant_to": list(each.invariant_to),
                "flattest": each.flattest,
                "sure": each.sure,
            }
            for name, each in self.items()
        }
        plain: dict[str, Any] = encode_nonfinite(
            {
                "schema": "saltflat.comparison/1",
                "models": {label: report.model for label, report in self.reports.items()},
                "answer": self.answer,
                "paired": self.paired,
                "contrasts": contrasts,
                "doubts": self.doubts,
            }
        )
        return plain

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as one self-contained HTML page and return the path."""
        html = load_later("render.html")  # not needed to compare
        written: Path = html.write_page(html.render_comparison_page(self), path)
        return written

    def to_frame(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per measure, layer and report; a whole network is the layer ``""``.

        Differences, ratios and verdicts are against the same row of the first report that has the measure.
        """
        columns = ["measure", "layer", "report", "value", "stderr", "difference", "ratio", "verdict"]
        return build_frame(self._build_rows(), columns)

    def plot(self, names: str | Sequence[str] | None = None, by: Literal["measure", "layer"] = "measure") -> Figure:
        """Return a ``matplotlib`` Figure.

        Args:
            names: the measures to plot; all if None.
            by: ``"measure"``: the ratio to the first report with its 99 % interval, a row per measure; or ``"layer"``:
                one panel per measure with a bar per layer and report.
        """
        wanted = list(self) if names is None else parse_measure_names(names)
        if not is_choice(by, ("measure", "layer")):
            raise make_unknown_name_error("choice of by", by, ("measure", "layer"))
        if by == "layer":
            readings = {name: self[name].readings for name in wanted}
            figure: Figure = load_later("render.plots").draw_readings(readings, " / ".join(self.reports))
            return figure
        contrasts = [self[name] for name in wanted]
        ratios: Figure = load_later("render.plots").draw_ratios(contrasts, list(self.reports), self.answer)
        return ratios

    def _build_rows(self) -> Iterator[dict[str, Any]]:
        for name, contrast in self.items():
            first = next(iter(contrast.readings.values()))
            for label, reading in contrast.readings.items():
                for row in build_frame_rows([reading]):
                    ours, theirs = _make_layer_reading(reading, row["layer"]), _make_layer_reading(first, row["layer"])
                    yield {
                        **{key: row[key] for key in ("layer", "value", "stderr")},
                        "measure": name,
                        "report": label,
                        "difference": compute_difference(theirs, ours),
                        "ratio": compute_ratio(theirs, ours),
                        "verdict": "" if reading is first else self._judge_layer(name, label, row["layer"]),
                    }

    def _judge_layer(self, name: str, label: str, layer: str) -> str:
        contrast = self[name]
        first, other = next(iter(contrast.readings.values())), contrast.readings[label]
        if layer == TOTAL:
            return contrast.verdicts[label]
        return judge_difference(
            _make_layer_reading(first, layer),
            _make_layer_reading(other, layer),
            None,
            _find_rounding_tolerance(self.reports),
        )


def compare(*reports: Source | Mapping[str, Source], names: str | Sequence[str] | None = None) -> Comparison:
    """Compare two or more reports; differences are from the first.

    Args:
        reports: reports, paths of saved ones, or a single mapping from labels to either.
        names: the measures to compare; all measures of any report if None.

    Values differ when they are more than 2.58 standard errors of their difference apart. The error is over the choice
    of the examples and over random draws. If all reports saw the same examples, differences are *paired*: what is
    common to both networks cancels. Otherwise the variances of both add up. Where an error is unknown, or a solver
    stopped early, the difference is not judged.
    """
    found = _load_labeled_reports(reports)
    if len(found) < 2:
        raise ReportError(f"Expected two or more reports, but got {len(found)}. Try passing another.")
    known = list(dict.fromkeys(name for report in found.values() for name in report))
    given = known if names is None else parse_measure_names(names)
    wanted = list(dict.fromkeys(normalize_measure_name(name, known) for name in given))
    for name in wanted:
        if name not in known:
            raise make_missing_measure_error(
                name, {k: v for report in found.values() for k, v in report.left_out.items()}, known
            )
    sizes = _find_shared_groups(list(found.values()))
    contrasts = {name: _build_contrast(name, found, sizes) for name in wanted}
    return Comparison(found, contrasts, tuple(find_doubts(found, contrasts)), paired=sizes is not None)


def _find_shared_groups(reports: Sequence[Report]) -> list[int] | None:
    """Return the sizes of the groups of examples if all reports saw the same examples, else None."""
    first, *others = (report.sample for report in reports)
    same = bool(first.get("fingerprint")) and bool(first.get("groups")) and all(each == first for each in others)
    return list(first["groups"]) if same else None


def _find_rounding_tolerance(reports: Mapping[str, Report]) -> float:
    return max(ROUNDING.get(str(report.settings.get("dtype")), ROUNDING["float64"]) for report in reports.values())


def _build_contrast(name: str, reports: Mapping[str, Report], sizes: Sequence[int] | None) -> Contrast:
    readings = {label: report[name] for label, report in reports.items() if name in report}
    (start, first), *others = readings.items()
    legend: Mapping[str, Any] = next((r.legend[name] for r in reports.values() if name in r.legend), {})

    def judge_pair(one: str, two: str) -> str:
        return judge_difference(readings[one], readings[two], sizes, _find_rounding_tolerance(reports))

    best, sure = find_flattest(readings, legend.get("smaller"), judge_pair)
    return Contrast(
        name,
        readings,
        {label: compute_difference(first, other) for label, other in others},
        {label: compute_ratio(first, other) for label, other in others},
        {label: compute_difference_error(first, other, sizes) for label, other in others},
        {label: judge_pair(start, label) for label, _ in others},
        tuple(legend.get("invariant_to", ())),
        bool(legend.get("logarithmic")),
        best,
        sure,
    )


def _make_layer_reading(reading: Reading, layer: str) -> Reading:
    """Return the reading of one layer, undefined where there is none."""
    if layer == TOTAL:
        return reading
    value, stderr = reading.layers.get(layer, float("nan")), reading.layer_stderr.get(layer)
    return Reading(
        reading.name,
        value,
        stderr=stderr,
        sampling_stderr=reading.layer_sampling_stderr.get(layer),
        exact=reading.exact,
        converged=reading.converged,
    )


def _load_labeled_reports(given: Sequence[Source | Mapping[str, Source]]) -> dict[str, Report]:
    """Return reports by label: the mapping's, the name of the file, or the position in the list."""
    if len(given) == 1 and isinstance(given[0], Mapping) and not isinstance(given[0], Report):
        return {str(label): _load_report(source) for label, source in given[0].items()}
    found: dict[str, Report] = {}
    for place, source in enumerate(given, 1):
        label = Path(source).stem if isinstance(source, str | os.PathLike) else str(place)
        while label in found:
            label += f" ({place})"
        found[label] = _load_report(source)
    return found


def _load_report(source: Source | Mapping[str, Source]) -> Report:
    if isinstance(source, Report):
        return source
    if isinstance(source, str | os.PathLike):
        return Report.load(source)
    raise ReportError(
        f"Expected reports, paths of saved ones, or one mapping of these, but got a {type(source).__name__} to "
        "compare. Try the result of saltflat.measure or Report.save."
    )
