"""What a study has found so far."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.errors import StudyError
from saltflat.report.change_text import format_count
from saltflat.report.frame import build_frame
from saltflat.report.table import render_text
from saltflat.report.text import make_printable
from saltflat.studies.grid import collect_axis_values, count_runs, is_same_value, iter_grid_points
from saltflat.studies.integrity import DamageError
from saltflat.studies.row import STATUSES, Row
from saltflat.studies.store import DEFINITION, ROWS, Store
from saltflat.studies.study import Study
from saltflat.studies.table import build_table, format_csv

if TYPE_CHECKING:
    from saltflat.studies.scores import Scores

MEANING = {
    "done": "reached the stopping rule",
    "missed": "did not reach the stopping rule; kept, and flagged",
    "diverged": "no longer finite; not measured",
    "failed": "ended in an error",
    "missing": "not yet run",
}
MOST_ERRORS = 5


@dataclass(frozen=True)
class Results:
    """The runs of a study, finished or not.

    Attributes:
        study: what was asked.
        rows: of the finished runs by key, in the order of the grid.
        folder: where they are kept.
        places: for every run of the grid its values on the axes, and its seed.
        notes: what a reader should know besides.
    """

    study: Study
    rows: Mapping[str, Row]
    folder: Path
    places: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Results:
        """What is in a folder now, also while a study is running in it.

        Nothing is changed, and no function that the folder's files name is imported: the folder may be anybody's.
        """
        store = Store(folder)
        definition = store.read_definition()
        if definition is None:
            raise StudyError(
                f"Got the folder {os.fspath(folder)!r} without {DEFINITION}. Want one that a study was run in. "
                "Do: check the path, or begin one with saltflat study run STUDY.yaml --out FOLDER."
            )
        study, keys = Study.from_dict(definition["study"]), definition["keys"]
        try:
            count = count_runs(study)
            if len(keys) != count:
                raise ValueError(f"{len(keys)} keys for {count} runs")
            places = dict(zip(keys, iter_grid_points(study), strict=True))
        except (TypeError, ValueError) as problem:
            raise _make_mismatch_error(folder, str(problem)) from problem
        rows, notes = {}, []
        for key in places:
            try:
                row = store.read_row(key)
            except DamageError as damage:
                notes.append(f"{key}.json is damaged ({damage.why}). The next run makes it again.")
                continue
            if row is None:
                continue
            if not all(is_same_value(row.config.get(name), value) for name, value in places[key].items()):
                raise _make_mismatch_error(folder, f"the run {key!r} has other settings than its row")
            rows[key] = row
        return cls(study, rows, store.folder, places, tuple(notes))

    @property
    def counts(self) -> dict[str, int]:
        """How many runs ended how, and how many are missing."""
        found = Counter(row.status for row in self.rows.values())
        return {**{status: found[status] for status in STATUSES}, "missing": len(self.places) - len(self.rows)}

    def table(self) -> list[dict[str, Any]]:
        """One line per run, in the order of the grid."""
        return build_table(self.rows, self.places, list(collect_axis_values(self.study)), self.study.measures)

    def csv(self) -> str:
        """The table as comma-separated values, as in ``table.csv``."""
        return format_csv(self.table())

    def to_frame(self) -> Any:
        """The table as a ``pandas.DataFrame``."""
        lines = self.table()
        return build_frame(lines, list(lines[0]) if lines else [])

    def scores(self, gap: str = "error", **options: Any) -> Scores:
        """How well each measure goes with the generalization gap; see :func:`saltflat.studies.scores.score`."""
        from saltflat.studies.scores import score

        taken = {name for row in self.rows.values() for name in row.readings}
        asked = {"measures": [name for name in self.study.measures if name in taken], **options}
        return score(self.rows.values(), self.study.axis_names, gap=gap, **asked)

    def write_html(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """The study as one page for a browser, with everything in it; see :func:`saltflat.studies.page.write_page`.

        Code that the study's files name runs only with ``allow_code=True``: audits of own networks or data need it.
        """
        from saltflat.studies.page import write_page

        return write_page(self, path, **options)

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        counts = self.counts
        yield Text(
            make_printable(f"{self.study.name}: {format_count(len(self.places), 'run')} in {self.folder}"), style="bold"
        )
        for status, count in counts.items():
            if count:
                yield Text(f"{count:7,} {status:9} {MEANING[status]}")
        failures = Counter(row.failure["error"] for row in self.rows.values() if row.failure)
        for error, count in failures.most_common(MOST_ERRORS):
            yield Text(make_printable(f"  {count} x {error}"), style="red")
        if len(failures) > MOST_ERRORS:
            others = f"  and {len(failures) - MOST_ERRORS} other errors, in {self.folder / ROWS}"
            yield Text(make_printable(others), style="red")
        for note in self.notes[:MOST_ERRORS]:
            yield Text(make_printable(note), style="yellow")


def _make_mismatch_error(folder: str | os.PathLike[str], why: str) -> StudyError:
    return StudyError(
        f"Got {DEFINITION} in {os.fspath(folder)!r}, which does not fit together ({why}). Want it as Study.run wrote "
        "it. Do: give saltflat study run again; it makes the file anew."
    )
