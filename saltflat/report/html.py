"""Studies, reports, comparisons and audits, each as one HTML file that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.report.file import replacing
from saltflat.report.html_audit import audited
from saltflat.report.html_bars import chart
from saltflat.report.html_page import filled, told
from saltflat.report.html_study import study_content
from saltflat.report.side_by_side import difference_with_error, unchanged_by
from saltflat.report.view import SIGNS, certified, facts, layers_of, marks, notes_of, signs

if TYPE_CHECKING:
    from saltflat.landscape import Landscape
    from saltflat.report.audit import Audit
    from saltflat.report.compare import Comparison
    from saltflat.report.report import Report
    from saltflat.studies.row import Row
    from saltflat.studies.scores import Scores

# More cells than this are not read, and would make the file heavy.
MOST_CELLS = 12_000
# So many measures beside each other fit on paper.
ACROSS = 7


def study_page(
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
    island, content = study_content(rows, axes, scores, audits or {}, landscapes or {}, warnings)
    return filled("study.html", ("page.js", "scatter.js"), island, title=title, facts=known, again=again, **content)


def report_page(report: Report) -> str:
    """One network: its measures, what each layer contributes, the certificate, and how it was measured."""
    notes, layers = notes_of(report), layers_of(report.values())
    used = "".join(map(signs, report.values()))
    charts = [chart(name, {"": reading}, [""]) for name, reading in report.items() if reading.layers]
    apart = [(name, reading) for name, reading in report.items() if reading.layers]
    left_out: dict[str, list[str]] = {}
    for name, reason in report.left_out.items():
        left_out.setdefault(reason, []).append(name)
    return filled(
        "report.html",
        ("page.js",),
        title=report.model,
        report=report,
        facts=facts(report),
        lines=[
            (name, marks(reading, notes), reading.value, reading, dict(report.legend.get(name, {})))
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
        certified=certified(report.certificate),
    )


def comparison_page(comparison: Comparison) -> str:
    """Networks side by side: values with bars, what differs by more than its errors, and what speaks against it."""
    labels = list(comparison.reports)
    lines = [
        {
            "contrast": each,
            "values": [
                told(each.readings[label].value, each.readings[label].stderr) if label in each.readings else ""
                for label in labels
            ],
            "unchanged_by": unchanged_by(each),
            "apart": {label: difference_with_error(each, label) for label in each.verdicts},
            "whole": chart(each.name, each.readings, labels, layers=False),
            "layers": chart(each.name, each.readings, labels) if layers_of(each.readings.values()) else None,
        }
        for each in comparison.values()
    ]
    return filled(
        "comparison.html",
        ("page.js",),
        title=" / ".join(labels),
        comparison=comparison,
        labels=labels,
        facts={label: facts(report) for label, report in comparison.reports.items()},
        lines=lines,
    )


def audit_page(audit: Audit) -> str:
    """What random rescalings did to every measure of one network."""
    return filled("audit.html", ("page.js",), title=audit.report.model, audit=audited(audit), source=audit)


def write_page(page: str, path: str | os.PathLike[str]) -> Path:
    """Write a page; a file that was there is replaced, whole or not at all."""
    with replacing(path) as part:
        part.write_text(page, encoding="utf-8", newline="\n")
    return Path(path)
