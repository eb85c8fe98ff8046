"""Whether the files of a study are what was written, found out without changing any of them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.errors import SaltflatError, StudyError
from saltflat.report.change_text import many
from saltflat.report.table import rendered
from saltflat.report.text import printable
from saltflat.studies.checkpoint import load_checkpoint
from saltflat.studies.integrity import DamageError, coverage, is_there, read_tensors
from saltflat.studies.lock import LOCK, holder, is_locked
from saltflat.studies.results import Results
from saltflat.studies.store import (
    ASIDE,
    DEFINITION,
    FOLDERS,
    OF_INITIAL,
    PARTIAL,
    ROWS,
    TABLE,
    WEIGHTS,
    Store,
    was_set_aside,
)

KIND = {
    ROWS: re.compile(r"(?P<key>.+)\.json"),
    WEIGHTS: re.compile(r"(?P<key>.+?)(?P<initial>\.initial)?\.safetensors"),
    PARTIAL: re.compile(r"(?P<key>.+)\.safetensors"),
}
MOST_NAMES = 5


@dataclass(frozen=True)
class Problem:
    """A file that is not what was written.

    Attributes:
        file: its path inside the study's folder.
        why: what is wrong with it.
        rerun: what the next run of the study does about it.
    """

    file: str
    why: str
    rerun: str


@dataclass(frozen=True)
class Verification:
    """What was found in a study's folder.

    Attributes:
        folder: that was looked at.
        problems: what is wrong, by file.
        checked: how many files of each kind are what was written.
        notes: what could not be checked, and what else a reader should know.
    """

    folder: Path
    problems: tuple[Problem, ...] = ()
    checked: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return rendered(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = ", ".join(many(count, kind) for kind, count in self.checked.items())
        yield Text(printable(f"{self.folder}: as written: {whole or 'nothing'}"), style="bold")
        for each in self.problems:
            yield Text(printable(f"{each.file}: {each.why}. The next run: {each.rerun}."), style="red")
        for note in self.notes:
            yield Text(printable(note), style="yellow")
        if self.problems:
            yield Text(f"{many(len(self.problems), 'file')} wrong.", style="bold red")
        else:
            yield Text("Nothing is wrong.", style="bold green")


def verify(folder: str | os.PathLike[str]) -> Verification:
    """Check every file of a study against its digest.

    Nothing is written, nobody is kept from working in the folder, and no function that the study names is imported.
    A digest shows damage and edits; it is not a signature, and does not show who wrote a file.

    Args:
        folder: that the study was run in.
    """
    place = Path(folder)
    files = (path for kind in FOLDERS for path in (place / kind).glob("*") if KIND[kind].fullmatch(path.name))
    if not os.path.lexists(place / DEFINITION) and not was_set_aside(place / DEFINITION) and not any(files):
        raise StudyError(
            f"Expected a folder that a study was run in, but got {os.fspath(folder)!r} without {DEFINITION}. "
            "Try the folder that was given to saltflat study run as --out."
        )
    return _Check(place).result()


class _Check:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store(folder)
        self.problems: dict[str, Problem] = {}
        self.checked: Counter[str] = Counter()
        self.bare: Counter[tuple[str, str]] = Counter()
        self.closed: list[str] = []
        self.other: list[str] = []
        self.aside: list[str] = []
        self.begun = 0
        self.study: Mapping[str, Any] = {}
        self.keys: set[str] | None = None

    def result(self) -> Verification:
        running = is_locked(self.folder)
        self._definition()
        names = {each: list(self._names(each)) for each in FOLDERS}
        for name in sorted(each.name for each in self.folder.iterdir()):
            if name not in (DEFINITION, TABLE, LOCK, *FOLDERS):
                self._stray(name)
        rows = {found["key"] for found in names[ROWS]}
        trained = {found["key"] for found in names[WEIGHTS]} | (self.keys or set())
        for key in sorted(rows | trained):
            self._run(key)
        for found in names[PARTIAL]:
            self._checkpoint(found["key"])
        results = self._results()
        if results is not None and not running:
            self._table(results)
        problems = tuple(self.problems[name] for name in sorted(self.problems))
        return Verification(self.folder, problems, dict(self.checked), tuple(self._notes(results, running)))

    def _definition(self) -> None:
        path = self.folder / DEFINITION
        rerun = "writes it again from the study's YAML file"
        try:
            found = self.store.definition()
        except DamageError as damage:
            self._wrong(path, damage.why, rerun)
            return
        if found is None:
            self._wrong(path, "it is not there", rerun)
            return
        self.study, self.keys = found["study"], {each for each in found["keys"] if isinstance(each, str)}
        self._fine(path, "definition")

    def _names(self, kind: str) -> Iterator[re.Match[str]]:
        place = self.folder / kind
        if place.is_symlink():
            self._wrong(place, "it is a link to another folder", "refuses to write there")
        elif place.exists() and not place.is_dir():
            self._wrong(place, "it is not a folder", "sets it aside, and makes what was in it again")
        if not place.is_dir():
            return
        for name in sorted(each.name for each in place.iterdir()):
            found = KIND[kind].fullmatch(name)
            if found:
                yield found
            else:
                self._stray(f"{kind}/{name}")

    def _stray(self, name: str) -> None:
        base = name.rpartition("/")[2]
        if base.startswith(".") and base.endswith(".part"):
            self.begun += 1
        else:
            (self.aside if ASIDE in name else self.other).append(name)

    def _run(self, key: str) -> None:
        status, trained = None, False
        row = self._good(lambda: self.store.row(key))
        if isinstance(row, DamageError):
            status = "damaged"
        elif row is not None:
            self._fine(self.store.row_path(key), "row")
            status = row.status
        found = self._good(lambda: self.store.trained(key))
        if isinstance(found, DamageError):
            again = "trains and measures the run again, with its group"
            if status == "failed":
                again = "leaves it, since the run failed; with --retry-failed, trains the run again"
            self._wrong(found.path, found.why, self._if_ours(key, again))
        elif found is not None:
            trained = True
            self._fine(self.store.weights_path(key), "weights file")
            if found[1] is not None:
                self._fine(self.store.initial_path(key), "initial weights file")
        if not trained:  # then nobody looked at these
            initial = self._good(lambda: self._initial(key))
            if isinstance(initial, DamageError) and self._name(initial.path) not in self.problems:
                self._wrong(initial.path, initial.why, self._if_ours(key, "trains the run, and writes it again"))
        if isinstance(row, DamageError):
            rebuilt = self.study.get("train") is None or self.study.get("network") is not None
            again = "measures the run again" if trained and rebuilt else "trains and measures the run again"
            self._wrong(row.path, row.why, self._if_ours(key, again))

    def _initial(self, key: str) -> None:
        path = self.store.initial_path(key)
        if is_there(path):
            read_tensors(path, OF_INITIAL)

    def _if_ours(self, key: str, again: str) -> str:
        known = self.keys is None or key in self.keys
        return again if known else "leaves it, since the study no longer has this run"

    def _checkpoint(self, group: str) -> None:
        path = self.store.checkpoint(group)
        found = self._good(lambda: load_checkpoint(path) if is_there(path) else None)
        if isinstance(found, DamageError):
            self._wrong(path, found.why, "begins its training again, or removes it if nothing of it is left to train")
        elif found is not None:
            self._fine(path, "checkpoint")

    def _results(self) -> Results | None:
        if self.keys is None or self.closed:
            return None
        try:
            return Results.load(self.folder)
        except SaltflatError as problem:
            self._wrong(self.folder / DEFINITION, f"it cannot be used ({problem})", "writes it again if it can")
            return None

    def _table(self, results: Results) -> None:
        path = self.folder / TABLE
        damaged = any(problem.file.startswith(f"{ROWS}/") for problem in self.problems.values())
        rerun = "writes it again from the rows"
        try:
            if not is_there(path):
                return
        except DamageError as damage:
            self._wrong(path, damage.why, rerun)
            return
        if damaged or results.counts["missing"]:
            self.bare["table", "since not all rows are there to compare it with"] += 1
        elif path.read_bytes() != results.csv().encode():
            self._wrong(path, "it is not what the rows say", rerun)
        else:
            self._fine(path, "table")

    def _good(self, read: Callable[[], Any]) -> Any:
        """Return what is read, or the damage."""
        try:
            return read()
        except DamageError as damage:
            return damage
        except StudyError as problem:  # a file that may not be read
            self.closed.append(str(problem))
            return None

    def _fine(self, path: Path, kind: str) -> None:
        self.checked[kind] += 1
        covered = "everything" if kind == "table" else coverage(path)
        if covered == "nothing":
            self.bare[kind, "beyond the form, since earlier versions wrote no digest"] += 1
        elif covered == "tensors":
            self.bare[kind, "beyond the tensors, since the digest of earlier versions covers nothing else"] += 1

    def _wrong(self, path: Path, why: str, rerun: str) -> None:
        name = self._name(path)
        self.problems[name] = Problem(name, why, rerun)

    def _name(self, path: Path) -> str:
        return os.path.relpath(path.absolute(), self.folder.absolute())

    def _notes(self, results: Results | None, running: bool) -> Iterator[str]:
        if running:
            who = holder(self.folder)
            yield (
                f"{who[0].upper()}{who[1:]} is working on it now. What it writes meanwhile can look wrong: check again "
                "when it has ended."
            )
        if results is not None and results.counts["missing"]:
            yield f"Not there yet: {many(results.counts['missing'], 'run')}. The next run makes them."
        for (kind, why), count in self.bare.items():
            yield f"Not checked: {many(count, kind)} {why}."
        yield from self.closed
        if self.begun:
            yield f"Half written: {many(self.begun, 'file')}. The next run removes them."
        for what, names in (
            ("Set aside as damaged before", self.aside),
            ("Not of the study, and left alone", self.other),
        ):
            if names:
                shown = ", ".join(names[:MOST_NAMES]) + (" ..." if names[MOST_NAMES:] else "")
                yield f"{what}: {shown} ({len(names):,})."
