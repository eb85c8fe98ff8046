"""The results of a study, as rows and as one table."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat._late import load_later
from saltflat.errors import StudyError
from saltflat.results.files import build_frame
from saltflat.results.text import format_count, format_setting, join_words, make_printable, render_text
from saltflat.studies.canonical import JsonLike
from saltflat.studies.grid import USUAL, collect_axis_values, count_runs, is_same_value, iter_grid_points
from saltflat.studies.recipe import ADDED
from saltflat.studies.row import STATUSES, Row
from saltflat.studies.store import DEFINITION, ROWS, DamageError, Store
from saltflat.studies.study import Study

if TYPE_CHECKING:
    from saltflat.studies.effects.results import Effects
    from saltflat.studies.fragility.results import Fragility
    from saltflat.studies.scores.results import Scores


OUTCOME = ("epochs", "train_loss", "train_error", "test_loss", "test_error")
GAPS = ("error", "loss")
# Characters with which a formula begins in a spreadsheet.
EXECUTED = ("=", "+", "-", "@", "\t", "\r", "\n")
SIZES = ("parameters", "norm", "distance")


def build_table(
    rows: Mapping[str, Row], places: Mapping[str, Mapping[str, Any]], axes: Sequence[str], measures: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one line per run, in the order of the grid; unknown values are None.

    Args:
        rows: rows of the finished runs by key.
        places: values on the axes and seed of every run of the grid.
        axes: names of the axes, the first columns.
        measures: names of the measures, the last columns.
    """
    lines = []
    for key, place in places.items():
        row = rows.get(key)
        outcome, gap = (None, {}) if row is None else (row.outcome, row.gap)
        readings = {} if row is None else row.readings
        lines.append(
            {
                "key": key,
                **{axis: place[axis] for axis in axes},
                "seed": place["seed"],
                "status": "missing" if row is None else row.status,
                **{name: getattr(outcome, name, None) for name in OUTCOME},
                **{f"gap_{name}": gap.get(name) for name in GAPS},
                **{name: getattr(outcome, name, None) for name in SIZES},
                **{name: readings[name].value if name in readings else None for name in measures},
            }
        )
    return lines


def format_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table as comma-separated values, with all digits of every float.

    A string that a spreadsheet would execute as a formula gets an apostrophe in front.

    Example:
        >>> format_csv([{"key": "a", "lr": 0.1, "widths": [64, 32], "gap": None}])
        'key,lr,widths,gap\\na,0.1,"[64, 32]",\\n'
        >>> print(format_csv([{"lr": -0.1, "note": "-0.1", "network": "=1+1"}]), end="")
        lr,note,network
        -0.1,-0.1,'=1+1
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")  # else it would not quote a cell with "\r", a new line for others
    for cells in [list(lines[0]), *(line.values() for line in lines)] if lines else []:
        writer.writerow([_format_csv_cell(value) for value in cells])
        text.seek(text.tell() - len("\r\n"))
        text.truncate()
        text.write("\n")
    return text.getvalue()


def _format_csv_cell(value: JsonLike) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)
    if not isinstance(value, str):
        return json.dumps(value)
    return f"'{value}" if value.startswith(EXECUTED) and not _is_number_text(value) else value


def _is_number_text(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and text.isascii() and text == text.strip()
    except ValueError:
        return False


MEANING = {
    "done": "reached the stopping rule",
    "missed": "did not reach the stopping rule; left out of effects and scores, unless asked for",
    "diverged": "no longer finite; not measured",
    "failed": "ended in an error",
    "missing": "not yet run",
}
MOST_ERRORS = 5


@dataclass(frozen=True)
class Results:
    """The runs of a study, finished or not.

    Attributes:
        study: the definition.
        rows: rows of the finished runs by key, in the order of the grid.
        folder: folder of the study.
        places: values on the axes and seed of every run of the grid.
        notes: other remarks.
    """

    study: Study
    rows: Mapping[str, Row]
    folder: Path
    places: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Results:
        """Load the results in a folder, also while a study is running in it.

        Nothing is changed, and no function that the folder's files name is imported, so it is safe on any folder.
        """
        store = Store(folder)
        definition = store.read_definition()
        if definition is None:
            raise StudyError(
                f"Expected the folder of a study, but got {os.fspath(folder)!r} without {DEFINITION}. "
                "Try another path, or saltflat study run STUDY.yaml --out FOLDER."
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
                notes.append(f"{damage.path.name} is damaged ({damage.why}). The next run makes it again.")
                continue
            if row is None:
                continue
            if study.train is None:  # rows of earlier versions lack settings that were added since
                row = replace(row, config={**row.config, **{k: USUAL[k] for k in ADDED if k not in row.config}})
            if not all(is_same_value(row.config.get(name), value) for name, value in places[key].items()):
                raise _make_mismatch_error(folder, f"the run {key!r} has other settings than its row")
            rows[key] = row
        return cls(study, rows, store.folder, places, tuple(dict.fromkeys(notes)))

    @property
    def counts(self) -> dict[str, int]:
        """The number of runs by status, including missing ones."""
        found = Counter(row.status for row in self.rows.values())
        return {**{status: found[status] for status in STATUSES}, "missing": len(self.places) - len(self.rows)}

    def describe_missed(self) -> str:
        """Return which networks missed the stopping rule, and by how much; empty if none did."""
        ended = [key for key, row in self.rows.items() if row.status in ("done", "missed")]
        missed = [key for key in ended if self.rows[key].status == "missed"]
        if not missed:
            return ""
        said = []
        for axis in collect_axis_values(self.study) if len(missed) < len(ended) else ():
            values = {key: format_setting(self.places[key].get(axis)) for key in ended}
            every, lost = Counter(values.values()), Counter(values[key] for key in missed)
            whole = [f"{value} ({every[value]})" for value in every if lost[value] == every[value]]
            if whole:
                said.append(f"all with {axis} {join_words(whole)}")
        outcomes = [outcome for key in missed if (outcome := self.rows[key].outcome) is not None]
        for name in ("loss", "error"):
            target = self.study.stop.get(name)
            above = [] if target is None else [getattr(each, f"train_{name}") for each in outcomes]
            above = [value for value in above if not value <= target]
            if above:
                ends = " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(above), max(above))))
                said.append(f"with a training {name} of {ends}, where {target:g} was asked for")
        return make_printable("; ".join([f"Missed the stopping rule: {format_count(len(missed), 'run')}", *said]) + ".")

    def table(self) -> list[dict[str, Any]]:
        """Return one line per run, in the order of the grid."""
        return build_table(self.rows, self.places, list(collect_axis_values(self.study)), self.study.measures)

    def csv(self) -> str:
        """Return the table as comma-separated values, as in ``table.csv``."""
        return format_csv(self.table())

    def to_frame(self) -> Any:
        """Return the table as a ``pandas.DataFrame``."""
        lines = self.table()
        return build_frame(lines, list(lines[0]) if lines else [])

    def scores(self, gap: str = "error", **options: Any) -> Scores:
        """Score how each measure correlates with the generalization gap; see :func:`saltflat.studies.scores.score`."""
        from saltflat.studies.scores.scoring import score

        taken = {name for row in self.rows.values() for name in row.readings}
        asked = {"measures": [name for name in self.study.measures if name in taken], **options}
        found = score(self.rows.values(), self.study.axis_names, gap=gap, **asked)
        named = zip(self.study.axis_names, self.study.axes, strict=True)
        joint = [f"{name} stands for {axis}, which vary together." for name, axis in named if name != axis]
        return replace(found, notes=(*found.notes, *joint))

    def effects(self, **options: Any) -> Effects:
        """Compare the values of each setting; see :func:`saltflat.studies.effects.compute_effects`."""
        from saltflat.studies.effects.compute import compute_effects

        return compute_effects(self, **options)

    def fragility(self, **options: Any) -> Fragility:
        """Compare rankings before and after a change; see :func:`saltflat.studies.fragility.compute_fragility`."""
        from saltflat.studies.fragility.compute import compute_fragility

        return compute_fragility(self, **options)

    def write_html(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the study as one self-contained web page; see :func:`saltflat.render.html.write_study_page`.

        Functions that the study's files name run only with ``allow_code=True``, which audits of them need.
        """
        written: Path = load_later("render.html").write_study_page(self, path, **options)
        return written

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
        missed = self.describe_missed()
        if missed:
            yield Text(missed)
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
        f"Expected {DEFINITION} as Study.run wrote it, but got one in {os.fspath(folder)!r} that does not match its "
        f"rows ({why}). Try saltflat study run again, which writes the file anew."
    )
