"""Render reports, comparisons, audits, bounds and studies as self-contained HTML pages, and write them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.errors import CodeNotAllowedError, SaltflatError, format_error_line
from saltflat.measures.registry import REFERENCES
from saltflat.render.bound import STATES, format_bound_answer, format_bound_facts, make_term_rows, plot_bounds
from saltflat.render.comparison import format_difference, format_invariances, format_ratio, name_ratio
from saltflat.render.html.page import encode_picture, format_quantity_html, is_log_scaled, render_page
from saltflat.render.html.study import build_audit_view, build_study_content
from saltflat.render.html.summary import GAPS
from saltflat.render.report import (
    SIGNS,
    collect_layers,
    collect_notes,
    find_main_layers,
    format_certificate,
    format_report_facts,
    format_report_marks,
    format_signs,
)
from saltflat.results.files import check_writable_path, replace_atomically
from saltflat.results.report import Reading, Report
from saltflat.studies.rebuild import audit_runs

if TYPE_CHECKING:
    from saltflat.audit.result import Audit
    from saltflat.bounds.bound import Bound
    from saltflat.landscape.result import Landscape
    from saltflat.results.comparison import Comparison
    from saltflat.studies.effects.results import Effects
    from saltflat.studies.results import Results
    from saltflat.studies.row import Row
    from saltflat.studies.scores.results import Scores


# Nobody reads more cells than this, and they would make the file large.
MOST_CELLS = 12_000
# The number of measures that fit side by side on paper.
ACROSS = 7


def render_study_page(
    title: str,
    facts: Mapping[str, Any],
    rows: Sequence[Row],
    axes: Sequence[str],
    scores: Mapping[str, Scores],
    audits: Mapping[str, Audit] | None = None,
    landscapes: Mapping[str, Landscape] | None = None,
    warnings: Sequence[str] = (),
    again: str = "",
    effects: Effects | None = None,
) -> str:
    """Return the page of a study: a summary in words, plots, scores, failures, and how to reproduce it.

    Args:
        title: the title of the page.
        facts: facts about the study, by name: strings, numbers, lists and mappings.
        rows: the runs.
        axes: the settings that the grid varies.
        scores: by gap, ``"error"`` or ``"loss"``; the first is shown first.
        audits: by the key of the run.
        landscapes: by name.
        warnings: shown first, with those of the scores.
        again: the command that reproduces the study.
        effects: how measures, losses and errors change with the settings.
    """
    known = {name: value for name, value in facts.items() if name != "made with"}  # the rows are more precise
    island, content = build_study_content(rows, axes, scores, audits or {}, landscapes or {}, warnings, effects)
    return render_page(
        "study.html", ("page.js", "scatter.js"), island, title=title, facts=known, again=again, **content
    )


def render_report_page(report: Report) -> str:
    """Return the page of a report: measures, contributions of layers, certificate and settings."""
    notes, layers = collect_notes(report), collect_layers(report.values())
    used = "".join(map(format_signs, report.values()))
    charts = [build_chart(name, {"": reading}, [""]) for name, reading in report.items() if reading.layers]
    apart = [(name, reading) for name, reading in report.items() if reading.layers]
    left_out: dict[str, list[str]] = {}
    for name, reason in report.left_out.items():
        left_out.setdefault(reason, []).append(name)
    return render_page(
        "report.html",
        ("page.js",),
        title=report.model,
        report=report,
        facts=format_report_facts(report),
        lines=[
            (name, format_report_marks(reading, notes), reading.value, reading, dict(report.legend.get(name, {})))
            for name, reading in report.items()
        ],
        sampled=any(reading.sampling_stderr is not None for reading in report.values()),
        signs=[(sign, meaning) for sign, meaning in SIGNS.items() if sign in used],
        notes=notes,
        charts=charts,
        layers=layers,
        parts=layers if len(layers) * len(report) <= MOST_CELLS else [],
        groups=[apart[start : start + ACROSS] for start in range(0, len(apart), ACROSS)],
        left_out=left_out,
        certified=format_certificate(report.certificate),
    )


def render_comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison: values with bars, significant differences, and reasons for caution."""
    labels = list(comparison.reports)
    lines = [
        {
            "contrast": each,
            "values": [
                format_quantity_html(each.readings[label].value, each.readings[label].stderr)
                if label in each.readings
                else ""
                for label in labels
            ],
            "unchanged_by": format_invariances(each),
            "apart": {label: format_difference(each, label) for label in each.verdicts},
            "ratios": {label: format_ratio(each, label) for label in each.verdicts},
            "whole": build_chart(each.name, each.readings, labels, layers=False),
            "layers": build_chart(each.name, each.readings, labels) if collect_layers(each.readings.values()) else None,
        }
        for each in comparison.values()
    ]
    return render_page(
        "comparison.html",
        ("page.js",),
        title=" / ".join(labels),
        comparison=comparison,
        labels=labels,
        ratio=name_ratio(comparison),
        facts={label: format_report_facts(report) for label, report in comparison.reports.items()},
        lines=lines,
    )


def render_audit_page(audit: Audit) -> str:
    """Return the page of an audit: the effect of random rescalings on every measure."""
    return render_page(
        "audit.html", ("page.js",), title=audit.report.model, audit=build_audit_view(audit), source=audit
    )


def render_result_page(result: Bound, title: str) -> str:
    """Return the page of a bound: what it says, what it is computed from, and what it rests on."""
    return render_page(
        "bound.html",
        ("page.js",),
        title=title,
        bound=result,
        facts=format_bound_facts(result),
        answer=format_bound_answer(result),
        good=result.is_valid and not result.is_vacuous,
        picture=encode_picture(plot_bounds([result])),
        terms=make_term_rows(result),
        states=STATES,
        reference=REFERENCES.get(result.reference, result.reference),
    )


def write_page(page: str, path: str | os.PathLike[str]) -> Path:
    """Write a page and return its path; an existing file is replaced atomically."""
    with replace_atomically(path) as part:
        part.write_text(page, encoding="utf-8", newline="\n")
    return Path(path)


def write_study_page(
    results: Results,
    path: str | os.PathLike[str],
    *,
    audits: int | Mapping[str, Audit] = 0,
    landscapes: Mapping[str, Landscape] | None = None,
    data_folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    tell: Callable[[str], object] | None = None,
    allow_code: bool = False,
    **options: Any,
) -> Path:
    """Write the page of a study atomically and return its path.

    Args:
        results: the results of the study.
        path: the path of the page.
        audits: the number of runs to audit under rescaling, spread over the range of gaps; or existing audits by key.
        landscapes: slices of the loss to show, by name.
        data_folder: the folder of named data sets, if not the one the study names; for audits.
        progress: show the progress of the audits; on a terminal if None.
        tell: called with what could not be computed for the page; the page says so, too.
        allow_code: import and call the functions that the study's files name, where audits need them. Without it the
            page says which audits were left out. ``tell`` gets the names before anything is imported.
        options: options of the scores, such as ``resamples``.
    """
    check_writable_path(path)
    lacking: list[str] = []
    found: Mapping[str, Audit] = {}
    if isinstance(audits, Mapping):
        found = audits
    elif audits:
        try:
            found = audit_runs(results, audits, data_folder, progress, allow_code=allow_code, tell=tell)
        except CodeNotAllowedError as problem:
            lacking.append(f"Audits were left out. {problem}")
        except Exception as problem:  # networks, weights and data of any folder can fail in any way
            lacking.append(f"No run was audited: {format_error_line(problem)}")
    scores = {}
    for gap in GAPS:
        try:
            scores[gap] = results.scores(gap, **options)
        except SaltflatError as problem:  # too few runs; the rest is worth looking at all the same
            lacking.append(f"No scores for the gap of the {gap}: {problem}")
    effects = None
    try:
        effects = results.effects(missed=options.get("missed", "leave out"))
    except SaltflatError as problem:
        lacking.append(f"Settings were not compared: {problem}")
    if tell is not None:
        for each in lacking:
            tell(each)
    text = render_study_page(
        results.study.name,
        collect_study_facts(results),
        _select_readings(results),
        results.study.axis_names,
        scores,
        found,
        landscapes or {},
        [*results.notes, *lacking],
        f"saltflat study run STUDY.yaml --out {results.folder}",
        effects,
    )
    return write_page(text, path)


def collect_study_facts(results: Results) -> dict[str, Any]:
    """Return facts about the study, by name."""
    study = results.study
    made_with: dict[str, Any] = next((dict(row.made_with) for row in results.rows.values() if row.made_with), {})
    return {
        "runs": {status: count for status, count in results.counts.items() if count},
        **{name: value for name, value in study.to_dict().items() if name not in ("name", "measures")},
        "measure": {name: value for name, value in study.measure_options.items() if value is not None},
        "made with": made_with,
    }


def _select_readings(results: Results) -> list[Row]:
    """Return the rows with only the measures that the study lists now."""
    wanted = results.study.measures
    return [
        replace(row, readings={name: row.readings[name] for name in wanted if name in row.readings})
        for row in results.rows.values()
    ]


# The most layers with a bar each.
MOST_LAYERS = 24


@dataclass(frozen=True)
class Bar:
    """One bar, on an axis of length 100.

    Attributes:
        series: the number of the network, from 0.
        label: the label of the network.
        start: where the bar begins.
        width: its length; 0 if there is no number.
        low: where its 95 % interval begins, None without one.
        high: where its interval ends.
        told: the number as text.
    """

    series: int
    label: str
    start: float
    width: float
    low: float | None
    high: float | None
    told: str


@dataclass(frozen=True)
class BarChart:
    """Bars by layer, or of whole networks; ``hidden`` counts smaller layers that are not shown."""

    name: str
    rows: list[tuple[str, list[Bar]]]
    log: bool
    hidden: int


def build_chart(name: str, series: Mapping[str, Reading], labels: Sequence[str], layers: bool = True) -> BarChart:
    """Return the bars of one measure.

    Args:
        name: the name of the measure.
        series: readings by label.
        labels: the labels of all networks, so that each keeps its color.
        layers: make a row per layer, else one row for the whole networks.
    """
    readings = list(series.values())
    known = collect_layers(readings) if layers else []
    shown = find_main_layers(readings, known, MOST_LAYERS) if layers else [""]
    parts = {row: {label: _get_value_and_error(reading, row) for label, reading in series.items()} for row in shown}
    values = [v for row in parts.values() for v, _ in row.values() if v is not None and math.isfinite(v)]
    log = bool(values) and is_log_scaled([value for value in values if value] or [0.0])
    # With room for intervals; one that reaches below zero has no such end on a logarithmic axis.
    ends = [end for row in parts.values() for each in row.values() for end in _compute_interval_ends(*each)]
    scale = _compute_axis_range([value for value in [*values, *ends] if value > 0 or not log], log)
    rows = [
        (row, [_build_bar(labels.index(label), label, *each, scale, log) for label, each in found.items()])
        for row, found in parts.items()
    ]
    return BarChart(name, rows, log, len(known) - len(shown) if layers else 0)


def _get_value_and_error(reading: Reading, row: str) -> tuple[float | None, float | None]:
    return (reading.layers.get(row), reading.layer_stderr.get(row)) if row else (reading.value, reading.stderr)


def _compute_axis_range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Return the ends of the axis; a logarithmic one begins below the smallest value, so that it has a bar, too."""
    if log:
        return math.log10(min(values)) - 0.3, math.log10(max(values))
    return min([0.0, *values]), max([0.0, *values])


def _build_bar(
    series: int, label: str, value: float | None, stderr: float | None, scale: tuple[float, float], log: bool
) -> Bar:
    if value is None:
        return Bar(series, label, 0.0, 0.0, None, None, "")
    told = format_quantity_html(value, stderr)
    if not math.isfinite(value) or (log and not value) or scale[0] == scale[1]:
        return Bar(series, label, 0.0, 0.0, None, None, told)
    begin, end = (
        (0.0, _compute_position(value, scale, log))
        if log
        else sorted([_compute_position(0.0, scale, log), _compute_position(value, scale, log)])
    )
    low, high = _place_interval(value, stderr, scale, log) if stderr and math.isfinite(stderr) else (None, None)
    return Bar(series, label, round(begin, 2), round(max(end - begin, 0.4), 2), low, high, told)


def _place_interval(value: float, stderr: float, scale: tuple[float, float], log: bool) -> tuple[float, float]:
    low, high = (round(_compute_position(end, scale, log), 2) for end in _compute_interval_ends(value, stderr))
    return low, high


def _compute_interval_ends(value: float | None, stderr: float | None) -> list[float]:
    """Return the ends of the 95 % interval; none where unknown."""
    if value is None or not stderr or not math.isfinite(value) or not math.isfinite(stderr):
        return []
    return [value - 1.96 * stderr, value + 1.96 * stderr]


def _compute_position(value: float, scale: tuple[float, float], log: bool) -> float:
    if log and value <= 0:
        return 0.0
    # Halved, so that the span of the largest floats does not overflow.
    low, high = scale[0] / 2, scale[1] / 2
    at = (math.log10(value) if log else value) / 2
    return max(0.0, min(100.0, 100 * (at - low) / (high - low)))
