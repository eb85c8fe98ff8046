"""Verify the files of a study without changing any of them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.errors import SaltflatError, StudyError
from saltflat.results.text import format_count, make_printable, render_text
from saltflat.studies.canonical import columns_to_version_1
from saltflat.studies.store.checkpoint import load_checkpoint
from saltflat.studies.store.folder import (
    ASIDE,
    DEFINITION,
    FOLDERS,
    OF_INITIAL,
    PARTIAL,
    ROWS,
    STUDY,
    TABLE,
    WEIGHTS,
    Store,
    has_damaged_copy,
)
from saltflat.studies.store.lock import LOCK, format_lock_holder, is_locked
from saltflat.studies.store.packed_rows import PACKED
from saltflat.studies.store.rows import DamageError, find_digest_coverage, has_file, read_tensors

if TYPE_CHECKING:
    from saltflat.studies.results import Results

KIND = {
    ROWS: re.compile(r"(?P<key>.+)\.json"),
    WEIGHTS: re.compile(r"(?P<key>.+?)(?P<initial>\.initial)?\.safetensors"),
    PARTIAL: re.compile(r"(?P<key>.+)\.safetensors"),
}
MOST_NAMES = 5


@dataclass(frozen=True)
class FileProblem:
    """A file that changed after it was written.

    Attributes:
        file: path inside the study's folder.
        why: the problem.
        rerun: what the next run of the study will do.
    """

    file: str
    why: str
    rerun: str


@dataclass(frozen=True)
class Verification:
    """The result of verifying a study's folder.

    Attributes:
        folder: the folder.
        problems: the files that changed.
        checked: number of unchanged files of each kind.
        notes: files that could not be checked, and other remarks.
    """

    folder: Path
    problems: tuple[FileProblem, ...] = ()
    checked: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = ", ".join(format_count(count, kind) for kind, count in self.checked.items())
        yield Text(make_printable(f"{self.folder}: as written: {whole or 'nothing'}"), style="bold")
        for each in self.problems:
            yield Text(make_printable(f"{each.file}: {each.why}. The next run: {each.rerun}."), style="red")
        for note in self.notes:
            yield Text(make_printable(note), style="yellow")
        if self.problems:
            yield Text(f"{format_count(len(self.problems), 'file')} wrong.", style="bold red")
        else:
            yield Text("Nothing is wrong.", style="bold green")


def verify(folder: str | os.PathLike[str]) -> Verification:
    """Check every file of a study against its digest.

    Nothing is written or locked, and no function that the study names is imported. A digest detects damage and edits;
    it is not a signature, and does not prove who wrote a file.

    Args:
        folder: folder of the study.
    """
    place = Path(folder)
    files = (path for kind in FOLDERS for path in (place / kind).glob("*") if KIND[kind].fullmatch(path.name))
    if not os.path.lexists(place / DEFINITION) and not has_damaged_copy(place / DEFINITION) and not any(files):
        raise StudyError(
            f"Expected a folder that a study was run in, but got {os.fspath(folder)!r} without {DEFINITION}. "
            "Try the folder that was given to saltflat study run as --out."
        )
    return _FolderCheck(place).check_files()


class _FolderCheck:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store(folder)
        self.problems: dict[str, FileProblem] = {}
        self.checked: Counter[str] = Counter()
        self.bare: Counter[tuple[str, str]] = Counter()
        self.closed: list[str] = []
        self.other: list[str] = []
        self.aside: list[str] = []
        self.begun = 0
        self.schema = ""
        self.study: Mapping[str, Any] = {}
        self.keys: set[str] | None = None

    def check_files(self) -> Verification:
        """Check all files of the folder."""
        running = is_locked(self.folder)
        self._check_definition()
        names = {each: list(self._iter_file_names(each)) for each in FOLDERS}
        for name in sorted(each.name for each in self.folder.iterdir()):
            if name not in (DEFINITION, TABLE, LOCK, PACKED, *FOLDERS):
                self._note_stray_file(name)
        rows = {found["key"] for found in names[ROWS]}
        packed = self._read_or_damage(lambda: self.store.packed.contents)
        if isinstance(packed, DamageError):
            self._add_problem(packed.path, packed.why, "sets it aside, and makes what was in it again")
        else:
            rows |= set(packed or ())
        trained = {found["key"] for found in names[WEIGHTS]} | (self.keys or set())
        for key in sorted(rows | trained):
            self._check_run(key)
        for found in names[PARTIAL]:
            self._check_checkpoint(found["key"])
        results = self._load_results()
        if results is not None and not running:
            self._check_table(results)
        problems = tuple(self.problems[name] for name in sorted(self.problems))
        return Verification(self.folder, problems, dict(self.checked), tuple(self._format_notes(results, running)))

    def _check_definition(self) -> None:
        path = self.folder / DEFINITION
        rerun = "writes it again from the study's YAML file"
        try:
            found = self.store.read_definition()
        except DamageError as damage:
            self._add_problem(path, damage.why, rerun)
            return
        if found is None:
            self._add_problem(path, "it is not there", rerun)
            return
        self.schema, self.study = found["schema"], found["study"]
        self.keys = {each for each in found["keys"] if isinstance(each, str)}
        self._count_good_file(path, "definition")

    def _iter_file_names(self, kind: str) -> Iterator[re.Match[str]]:
        place = self.folder / kind
        if place.is_symlink():
            self._add_problem(place, "it is a link to another folder", "refuses to write there")
        elif place.exists() and not place.is_dir():
            self._add_problem(place, "it is not a folder", "sets it aside, and makes what was in it again")
        if not place.is_dir():
            return
        for name in sorted(each.name for each in place.iterdir()):
            found = KIND[kind].fullmatch(name)
            if found:
                yield found
            else:
                self._note_stray_file(f"{kind}/{name}")

    def _note_stray_file(self, name: str) -> None:
        base = name.rpartition("/")[2]
        if base.startswith(".") and base.endswith(".part"):
            self.begun += 1
        else:
            (self.aside if ASIDE in name else self.other).append(name)

    def _check_run(self, key: str) -> None:
        status, trained = None, False
        row = self._read_or_damage(lambda: self.store.read_row(key))
        if isinstance(row, DamageError):
            status = "damaged"
        elif row is not None:
            if has_file(self.store.row_path(key)):
                self._count_good_file(self.store.row_path(key), "row")
            else:
                self.checked["packed row"] += 1
            status = row.status
        found = self._read_or_damage(lambda: self.store.read_trained(key))
        if isinstance(found, DamageError):
            again = "trains and measures the run again, with its group"
            if status == "failed":
                again = "leaves it, since the run failed; with --retry-failed, trains the run again"
            self._add_problem(found.path, found.why, self._format_rerun(key, again))
        elif found is not None:
            trained = True
            self._count_good_file(self.store.weights_path(key), "weights file")
            if found[1] is not None:
                self._count_good_file(self.store.initial_path(key), "initial weights file")
        if not trained:  # then nobody looked at these
            initial = self._read_or_damage(lambda: self._read_initial(key))
            if isinstance(initial, DamageError) and self._get_relative_path(initial.path) not in self.problems:
                self._add_problem(
                    initial.path, initial.why, self._format_rerun(key, "trains the run, and writes it again")
                )
        if isinstance(row, DamageError) and self._get_relative_path(row.path) not in self.problems:
            rebuilt = self.study.get("train") is None or self.study.get("network") is not None
            again = "measures the run again" if trained and rebuilt else "trains and measures the run again"
            self._add_problem(row.path, row.why, self._format_rerun(key, again))

    def _read_initial(self, key: str) -> None:
        path = self.store.initial_path(key)
        if has_file(path):
            read_tensors(path, OF_INITIAL)

    def _format_rerun(self, key: str, again: str) -> str:
        known = self.keys is None or key in self.keys
        return again if known else "leaves it, since the study no longer has this run"

    def _check_checkpoint(self, group: str) -> None:
        path = self.store.checkpoint_path(group)
        found = self._read_or_damage(lambda: load_checkpoint(path) if has_file(path) else None)
        if isinstance(found, DamageError):
            self._add_problem(
                path, found.why, "begins its training again, or removes it if nothing of it is left to train"
            )
        elif found is not None:
            self._count_good_file(path, "checkpoint")

    def _load_results(self) -> Results | None:
        from saltflat.studies.results import Results  # at call time: it imports this package

        if self.keys is None or self.closed:
            return None
        try:
            return Results.load(self.folder)
        except SaltflatError as problem:
            self._add_problem(self.folder / DEFINITION, f"it cannot be used ({problem})", "writes it again if it can")
            return None

    def _check_table(self, results: Results) -> None:
        path = self.folder / TABLE
        damaged = any(problem.file.startswith(f"{ROWS}/") for problem in self.problems.values())
        rerun = "writes it again from the rows"
        try:
            if not has_file(path):
                return
        except DamageError as damage:
            self._add_problem(path, damage.why, rerun)
            return
        if damaged or results.counts["missing"]:
            self.bare["table", "since not all rows are there to compare it with"] += 1
        elif path.read_bytes() != self._expect_table(results).encode():
            self._add_problem(path, "it is not what the rows say", rerun)
        else:
            self._count_good_file(path, "table")

    def _expect_table(self, results: Results) -> str:
        text = results.csv()
        if self.schema not in STUDY.older:
            return text
        header, _, lines = text.partition("\n")
        names = columns_to_version_1(header.split(","), results.study.settings.get("optimizer"))
        return "\n".join([",".join(names), lines])

    def _read_or_damage(self, read: Callable[[], Any]) -> Any:
        """Return what is read, or the damage."""
        try:
            return read()
        except DamageError as damage:
            return damage
        except StudyError as problem:  # a file that may not be read
            self.closed.append(str(problem))
            return None

    def _count_good_file(self, path: Path, kind: str) -> None:
        self.checked[kind] += 1
        covered = "everything" if kind == "table" else find_digest_coverage(path)
        if covered == "nothing":
            self.bare[kind, "beyond the form, since earlier versions wrote no digest"] += 1
        elif covered == "tensors":
            self.bare[kind, "beyond the tensors, since the digest of earlier versions covers nothing else"] += 1

    def _add_problem(self, path: Path, why: str, rerun: str) -> None:
        name = self._get_relative_path(path)
        self.problems[name] = FileProblem(name, why, rerun)

    def _get_relative_path(self, path: Path) -> str:
        return os.path.relpath(path.absolute(), self.folder.absolute())

    def _format_notes(self, results: Results | None, running: bool) -> Iterator[str]:
        if running:
            who = format_lock_holder(self.folder)
            yield (
                f"{who[0].upper()}{who[1:]} is working on it now. What it writes meanwhile can look wrong: check again "
                "when it has ended."
            )
        if results is not None and results.counts["missing"]:
            yield f"Not there yet: {format_count(results.counts['missing'], 'run')}. The next run makes them."
        for (kind, why), count in self.bare.items():
            yield f"Not checked: {format_count(count, kind)} {why}."
        yield from self.closed
        if self.begun:
            yield f"Half written: {format_count(self.begun, 'file')}. The next run removes them."
        for what, names in (
            ("Set aside as damaged before", self.aside),
            ("Not of the study, and left alone", self.other),
        ):
            if names:
                shown = ", ".join(names[:MOST_NAMES]) + (" ..." if names[MOST_NAMES:] else "")
                yield f"{what}: {shown} ({len(names):,})."
