"""Write the page of a study."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.errors import CodeNotAllowedError, SaltflatError, format_error_line
from saltflat.results.files import check_writable_path
from saltflat.studies.rebuild import audit_runs

if TYPE_CHECKING:
    from saltflat.audit.result import Audit
    from saltflat.landscape.result import Landscape
    from saltflat.studies.results import Results


GAPS = ("error", "loss")


def write_page(
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
    """Write the page, whole or not at all.

    Args:
        results: of the study.
        path: of the page.
        audits: rescale so many of the runs, spread over the gaps that there are, and see which measures notice;
            or audits by key that were made before.
        landscapes: slices of the loss to show, by what they are called.
        data_folder: where named data sets are, if not where the study says; for audits.
        progress: of the audits, on a terminal if None.
        tell: is called with what could not be done for the page; the page says so, too.
        allow_code: import and call the functions that the study's files name, where audits need them. Without it the
            page says which audits were left out. ``tell`` gets the names before anything is imported.
        options: of the scores, such as ``resamples``.
    """
    from saltflat.render import html  # needs packages that only pages do

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
        except Exception as problem:  # networks, weights and data of a folder that is not ours can fail in any way
            lacking.append(f"No run was audited: {format_error_line(problem)}")
    scores = {}
    for gap in GAPS:
        try:
            scores[gap] = results.scores(gap, **options)
        except SaltflatError as problem:  # too few runs; the others are worth looking at all the same
            lacking.append(f"No scores for the gap of the {gap}: {problem}")
    if tell is not None:
        for each in lacking:
            tell(each)
    text = html.render_study_page(
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
    return html.write_page(text, path)


def collect_study_facts(results: Results) -> dict[str, Any]:
    """What a reader should know of the study, by name."""
    study = results.study
    made_with: dict[str, Any] = next((dict(row.made_with) for row in results.rows.values() if row.made_with), {})
    return {
        "runs": {status: count for status, count in results.counts.items() if count},
        **{name: value for name, value in study.to_dict().items() if name not in ("name", "measures")},
        "measure": {name: value for name, value in study.measure_options.items() if value is not None},
        "made with": made_with,
    }


def _select_readings(results: Results) -> list[Any]:
    """Rows with the measures that the study is about; what was measured before and is no longer asked for is left."""
    wanted = results.study.measures
    return [
        replace(row, readings={name: row.readings[name] for name in wanted if name in row.readings})
        for row in results.rows.values()
    ]
