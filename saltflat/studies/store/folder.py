"""The folder of a study, opened by one process at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from saltflat.errors import ReportError, StudyError, format_error_line
from saltflat.results.files import FileFormat, read_json, replace_atomically
from saltflat.studies.canonical import compute_digest, study_from_version_1
from saltflat.studies.row import Row, TrainedNetwork
from saltflat.studies.store.checkpoint import load_checkpoint
from saltflat.studies.store.lock import LOCK, lock_folder
from saltflat.studies.store.packed_rows import PACKED, PackedRows
from saltflat.studies.store.rows import (
    ROW,
    DamageError,
    add_digest,
    check_digest,
    explain_damage,
    find_digest_coverage,
    has_file,
    outcome_from_dict,
    outcome_to_dict,
    read_tensors,
    row_from_dict,
    row_to_dict,
    serialize_tensors,
)

if TYPE_CHECKING:
    from saltflat.studies.study import Study


STUDY = FileFormat("saltflat.study/2", "a study", "Study.run", older=("saltflat.study/1",))
DEFINITION, TABLE = "study.json", "table.csv"
ROWS, WEIGHTS, PARTIAL = "rows", "weights", "partial"
FOLDERS = (ROWS, WEIGHTS, PARTIAL)
# Metadata of weights, and of weights before training, that earlier versions wrote.
OF_WEIGHTS: tuple[str, ...] = ("key", "config", "outcome", "seconds")
OF_INITIAL: tuple[str, ...] = ()
ASIDE = ".damaged"
Found = TypeVar("Found")


class Store:
    """Read and write the files of a study.

    Attributes:
        folder: folder of the study.
        tell: called with messages for the user, such as that a damaged file was set aside.
    """

    def __init__(self, folder: str | os.PathLike[str], tell: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.tell = Path(folder), tell
        self.packed = PackedRows(self.folder)

    def row_path(self, key: str) -> Path:
        """Return the path of a run's row."""
        return self.folder / ROWS / f"{key}.json"

    def weights_path(self, key: str) -> Path:
        """Return the path of a run's weights."""
        return self.folder / WEIGHTS / f"{key}.safetensors"

    def initial_path(self, key: str) -> Path:
        """Return the path of a run's weights before training."""
        return self.folder / WEIGHTS / f"{key}.initial.safetensors"

    def checkpoint_path(self, group: str) -> Path:
        """Return the path of a group's checkpoint."""
        # Workers may have another current folder.
        return self.folder.absolute() / PARTIAL / f"{group}.safetensors"

    def read_row(self, key: str) -> Row | None:
        """Return the row of a run, from its file or from the packed ones, None if there is none.

        Raise a DamageError if the file changed.
        """
        path = self.row_path(key)
        if not has_file(path):
            return self.packed.read_row(key)
        try:
            row = row_from_dict(read_json(path, ROW))
        except (ReportError, StudyError) as problem:
            raise DamageError(path, explain_damage(problem)) from problem
        _check_key(path, row.key, key)
        return row

    def write_row(self, row: Row) -> None:
        """Write the row of a run."""
        self._write_bytes(self.row_path(row.key), _dump_json(row_to_dict(row)))

    def read_trained(self, key: str) -> tuple[TrainedNetwork, dict[str, Tensor] | None] | None:
        """Return a trained run and its weights before training, if they were kept; None if there is no run.

        Raise a DamageError if a file changed, or was set aside and has not been written again.
        """
        path, before = self.weights_path(key), self.initial_path(key)
        if not has_file(path):
            if has_damaged_copy(path):
                raise DamageError(path, "it was set aside and has not been made again")
            return None
        weights, facts = read_tensors(path, OF_WEIGHTS)
        try:
            _check_key(path, facts["key"], key)
            seconds = float(facts["seconds"])
            found = TrainedNetwork(weights, outcome_from_dict(json.loads(facts["outcome"])), seconds)
        except DamageError:
            raise
        except Exception as problem:  # earlier versions had no digest over these
            raise DamageError(path, explain_damage(problem)) from problem
        # Earlier versions did not write down whether there are any.
        expected = facts.get("initial")
        if expected == "":
            return found, None
        if not has_file(before):
            if expected is not None or has_damaged_copy(before):
                raise DamageError(before, "it is not there")
            return found, None
        initial, beside = read_tensors(before, OF_INITIAL)
        _check_key(before, beside.get("key", key if expected is None else None), key)
        if expected not in (None, compute_digest(beside, initial)):
            raise DamageError(before, "it is of another training of this run")
        return found, initial

    def write_trained(
        self, key: str, config: Mapping[str, Any], trained: TrainedNetwork, initial: Mapping[str, Tensor] | None
    ) -> None:
        """Write the weights, those before training first, so that the others are never there alone."""
        facts = {
            "key": key,
            "config": json.dumps(config),
            "outcome": json.dumps(outcome_to_dict(trained.outcome)),
            "seconds": repr(trained.seconds),
            "initial": "",
        }
        if initial is not None:
            before, beside = _copy_tensors(initial), {"key": key}
            facts["initial"] = compute_digest(beside, before)
            self._write_bytes(self.initial_path(key), serialize_tensors(before, beside))
        self._write_bytes(self.weights_path(key), serialize_tensors(_copy_tensors(trained.weights), facts))

    def has_checkpoint(self, group: str) -> bool:
        """Return whether a group has a checkpoint. Raise a DamageError if the file changed."""
        path = self.checkpoint_path(group)
        return has_file(path) and bool(load_checkpoint(path))

    def write_table(self, text: str) -> Path:
        """Write ``table.csv``."""
        return self._write_bytes(self.folder / TABLE, text.encode())

    def read_definition(self) -> dict[str, Any] | None:
        """Return the definition of the study, with the present names of settings; None if there is none yet."""
        path = self.folder / DEFINITION
        if not has_file(path):
            return None
        try:
            found = check_digest(read_json(path, STUDY))
            kinds = {"study": dict, "data": dict, "keys": list}
            wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
            if wrong or not isinstance(found["study"].get("name"), str):
                raise ValueError(f"its {wrong[0] if wrong else 'study'!r} is missing or of another kind")
        except (ValueError, RecursionError) as problem:
            raise DamageError(path, explain_damage(problem)) from problem
        if found["schema"] == STUDY.schema:
            return found
        return {**found, "study": study_from_version_1(found["study"])}

    def write_definition(self, content: Mapping[str, Any]) -> None:
        """Write the definition of the study."""
        self._write_bytes(self.folder / DEFINITION, _dump_json(add_digest({"schema": STUDY.schema, **content})))

    def read_or_set_aside(self, read: Callable[[], Found]) -> Found | None:
        """Return what is read; if the file is damaged, set it aside, so that it is written again, and return None."""
        try:
            return read()
        except DamageError as damage:
            self.set_aside(damage)
            return None

    def set_aside(self, damage: DamageError) -> None:
        """Rename a damaged file, and tell the user. Of packed rows, those that are whole become files again."""
        path, where = damage.path, ""
        if os.path.lexists(path):
            if path == self.packed.path:
                for key, text in self.packed.iter_whole_rows():
                    if not os.path.lexists(self.row_path(key)):
                        self._write_bytes(self.row_path(key), text)
            names = (path.with_name(path.name + ASIDE + (f".{n}" if n else "")) for n in count())
            aside = next(each for each in names if not os.path.lexists(each))
            self._apply_change(lambda: path.replace(aside), path)
            where = f"set aside as {aside.name}, and "
        self.tell(f"{path.name} is damaged ({damage.why}): {where}made again.")

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        self._apply_change(lambda: path.unlink(missing_ok=True), path)

    def _write_bytes(self, path: Path, content: bytes) -> Path:
        def write_synced() -> None:
            with replace_atomically(path, follow_links=False) as part, part.open("xb") as file:
                file.write(content)
            # The new name is in the folder, which has to reach the disk as well.
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

        if path.exists() and not path.is_file() and not path.is_symlink():
            self.set_aside(DamageError(path, "it is not a regular file"))
        self._apply_change(write_synced, path)
        return path

    def _apply_change(self, change: Callable[[], object], path: Path) -> None:
        try:
            change()
        except (OSError, ReportError) as problem:
            raise make_write_error(path, problem) from problem


def has_damaged_copy(path: Path) -> bool:
    """Return whether a damaged file of this name was set aside."""
    return os.path.lexists(path.with_name(path.name + ASIDE))


def make_write_error(path: Path, problem: BaseException) -> StudyError:
    """Return the error for a full disk or a folder without write permission."""
    cause = problem if isinstance(problem, OSError) else problem.__cause__
    why = cause.strerror if isinstance(cause, OSError) and cause.strerror else format_error_line(problem)
    return StudyError(
        f"Expected a folder with room that may be written to, but got {str(path)!r}, which cannot be written "
        f"({why}). Try the same command again after making room: all finished runs are kept, and it resumes from there."
    )


def _check_key(path: Path, found: str | None, key: str) -> None:
    if found != key:
        raise DamageError(path, f"it is of the run {found!r}")


def _dump_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False, indent=1) + "\n").encode()


def _copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, without shared memory, as safetensors requires; other values are left out."""
    return {
        name: value.detach().cpu().contiguous().clone() for name, value in tensors.items() if isinstance(value, Tensor)
    }


OURS = {LOCK, DEFINITION, TABLE, PACKED, *FOLDERS}


@contextmanager
def open_store(
    study: Study,
    keys: list[str],
    fingerprint: str,
    folder: str | os.PathLike[str],
    tell: Callable[[str], None],
) -> Iterator[Store]:
    """Open the folder of a study for this process alone; create it if needed, refuse a folder of something else."""
    store = Store(folder, tell)
    with ExitStack() as stack:
        try:
            _make_folder(store.folder)
            _check_study_folder(store.folder)
            stack.enter_context(lock_folder(store.folder))
            for each in FOLDERS:
                _make_subfolder(store, store.folder / each)
            _remove_partial_files(store.folder)
        except OSError as problem:
            raise make_write_error(store.folder, problem) from problem
        _update_definition(store, study, keys, fingerprint)
        yield store


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as problem:
        raise StudyError(
            f"Expected a folder, but got {str(folder)!r}, which is a file. Try giving another place."
        ) from problem


def _make_subfolder(store: Store, folder: Path) -> None:
    """Create a subfolder; a file in its place is set aside."""
    if folder.is_symlink():  # not followed: files would be written and removed in a foreign folder
        raise StudyError(
            f"Expected {str(folder)!r} to be a folder, but it is a link to {os.readlink(folder)!r}. Try moving the "
            "folder itself here, or put the whole study where there is room and name that place as its folder."
        )
    if folder.exists() and not folder.is_dir():
        store.set_aside(DamageError(folder, "it is not a folder"))
    folder.mkdir(exist_ok=True)


def _check_study_folder(folder: Path) -> None:
    if (folder / DEFINITION).exists():
        return
    others = [each.name for each in folder.iterdir() if not _is_partial_file(each)]
    # Damaged files that were set aside are ours, too.
    foreign = sorted(name for name in others if name.partition(ASIDE)[0] not in OURS)
    if foreign:
        raise StudyError(
            f"Expected an empty folder, or that of a study, but got the folder {str(folder)!r}, which holds "
            f"{', '.join(foreign[:3])}{(' ...' if foreign[3:] else '')} and no study. Try giving another one."
        )


def _is_partial_file(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".part")


def _remove_partial_files(folder: Path) -> None:
    """Remove files that killed processes had begun to write."""
    for place in (folder, *(folder / each for each in FOLDERS)):
        for path in place.iterdir():
            if _is_partial_file(path) and (path.is_symlink() or not path.is_dir()):
                path.unlink(missing_ok=True)


def _update_definition(store: Store, study: Study, keys: list[str], fingerprint: str) -> None:
    """Check that the folder belongs to the study, and write its definition if it changed."""
    # All data that runs here were trained on: a definition may return to an earlier one.
    data = {compute_digest(study.data.identity): fingerprint}
    there = store.read_or_set_aside(store.read_definition)
    content: dict[str, Any] = {"study": study.to_dict(), "data": data, "keys": keys}
    if there is not None:
        _check_same_study(there, study, data, store.folder)
        content["data"] = {**there["data"], **data}
        # As JSON, in which the order of the axes counts.
        known = all(json.dumps(there[key]) == json.dumps(value) for key, value in content.items())
        current = there["schema"] == STUDY.schema
        if known and current and find_digest_coverage(store.folder / DEFINITION) == "everything":
            return
        _tell_left_out_runs(store, keys)
    store.write_definition(content)


def _check_same_study(there: Mapping[str, Any], study: Study, data: Mapping[str, str], folder: Path) -> None:
    name = there["study"]["name"]
    if name != study.name:
        raise StudyError(
            f"Expected a folder for {study.name!r}, but got the folder {str(folder)!r}, which holds the study "
            f"{name!r}. Try giving another one, --out."
        )
    if any(there["data"].get(source, fingerprint) != fingerprint for source, fingerprint in data.items()):
        raise StudyError(
            f"Expected the same examples, but got data {study.data.name!r} that are not those which the runs in "
            f"{str(folder)!r} were trained on, though they have the same name. Try bringing them back, or giving "
            "another folder."
        )


def _tell_left_out_runs(store: Store, keys: list[str]) -> None:
    known = set(keys)
    others = [each for each in (store.folder / ROWS).glob("*.json") if each.stem not in known]
    if others:
        store.tell(f"{len(others)} runs of an earlier definition are kept, and left out of this one.")
