"""Render reports, comparisons, audits and studies as self-contained HTML pages, and write them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.errors import CodeNotAllowedError, SaltflatError, format_error_line
from saltflat.render.comparison import format_difference, format_invariances
from saltflat.render.html.bars import build_chart
from saltflat.render.html.page import format_quantity_html, render_page
from saltflat.render.html.study import build_audit_view, build_study_content
from saltflat.render.html.summary import GAPS
from saltflat.render.report import (
    SIGNS,
    collect_layers,
    collect_notes,
    format_certificate,
    format_report_facts,
    format_report_marks,
    format_signs,
)
from saltflat.results.files import check_writable_path, replace_atomically
from saltflat.studies.rebuild import audit_runs

if TYPE_CHECKING:
    from saltflat.audit.result import Audit
    from saltflat.landscape.result import Landscape
    from saltflat.results.comparison import Comparison
    from saltflat.results.report import Report
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
    """
    known = {name: value for name, value in facts.items() if name != "made with"}  # the rows are more precise
    island, content = build_study_content(rows, axes, scores, audits or {}, landscapes or {}, warnings)
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
        facts={label: format_report_facts(report) for label, report in comparison.reports.items()},
        lines=lines,
    )


def render_audit_page(audit: Audit) -> str:
    """Return the page of an audit: the effect of random rescalings on every measure."""
    return render_page(
        "audit.html", ("page.js",), title=audit.report.model, audit=build_audit_view(audit), source=audit
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
