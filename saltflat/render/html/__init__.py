"""Reports, comparisons, audits and studies as self-contained HTML pages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.render.comparison import format_difference, format_invariances
from saltflat.render.html.bars import build_chart
from saltflat.render.html.page import format_quantity_html, render_page
from saltflat.render.html.study import build_audit_view, build_study_content
from saltflat.render.report import (
    SIGNS,
    collect_layers,
    collect_notes,
    format_certificate,
    format_report_facts,
    format_report_marks,
    format_signs,
)
from saltflat.results.files import replace_atomically

if TYPE_CHECKING:
    from saltflat.audit.result import Audit
    from saltflat.landscape.result import Landscape
    from saltflat.results.comparison import Comparison
    from saltflat.results.report import Report
    from saltflat.studies.row import Row
    from saltflat.studies.scores.results import Scores


# More cells than this are not read, and would make the file heavy.
MOST_CELLS = 12_000
# So many measures beside each other fit on paper.
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
    """A whole study to look at: a summary in words, plots, scores, what failed, and how to make it again.

    Args:
        title: of the page.
        facts: what a reader should know of the study, by name: texts, numbers, lists and mappings.
        rows: the runs.
        axes: the settings that the grid varies.
        scores: by gap, ``"error"`` or ``"loss"``; the first is shown first.
        audits: by the key of the run.
        landscapes: by what they are called.
        warnings: shown before everything else, with those of the scores.
        again: the command that makes the study again.
    """
    known = {name: value for name, value in facts.items() if name != "made with"}  # the rows know better
    island, content = build_study_content(rows, axes, scores, audits or {}, landscapes or {}, warnings)
    return render_page(
        "study.html", ("page.js", "scatter.js"), island, title=title, facts=known, again=again, **content
    )


def render_report_page(report: Report) -> str:
    """One network: its measures, what each layer contributes, the certificate, and how it was measured."""
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
    """Networks side by side: values with bars, what differs by more than its errors, and what speaks against it."""
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
    """What random rescalings did to every measure of one network."""
    return render_page(
        "audit.html", ("page.js",), title=audit.report.model, audit=build_audit_view(audit), source=audit
    )


def write_page(page: str, path: str | os.PathLike[str]) -> Path:
    """Write a page; a file that was there is replaced, whole or not at all."""
    with replace_atomically(path) as part:
        part.write_text(page, encoding="utf-8", newline="\n")
    return Path(path)
