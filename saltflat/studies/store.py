"""The folder of a study: every file in it is whole, and nothing that was finished is ever lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from saltflat.errors import ReportError, StudyError, format_error_line
from saltflat.report.file import FileFormat, read_json, replace_atomically
from saltflat.studies.canonical import compute_digest
from saltflat.studies.checkpoint import load_checkpoint
from saltflat.studies.integrity import (
    DamageError,
    add_digest,
    check_digest,
    explain_damage,
    has_file,
    read_tensors,
    serialize_tensors,
)
from saltflat.studies.row import Row
from saltflat.studies.row_file import ROW, outcome_from_dict, outcome_to_dict, row_from_dict, row_to_dict
from saltflat.studies.trained import TrainedNetwork

STUDY = FileFormat("saltflat.study/1", "a study", "Study.run")
DEFINITION, TABLE = "study.json", "table.csv"
ROWS, WEIGHTS, PARTIAL = "rows", "weights", "partial"
FOLDERS = (ROWS, WEIGHTS, PARTIAL)
# What earlier versions wrote beside the weights, and beside those before training.
OF_WEIGHTS: tuple[str, ...] = ("key", "config", "outcome", "seconds")
OF_INITIAL: tuple[str, ...] = ()
ASIDE = ".damaged"
Found = TypeVar("Found")


class Store:
    """What a study keeps in its folder.

    Attributes:
        folder: where.
        tell: called with what a person should know, such as a damaged file that was set aside.
    """

    def __init__(self, folder: str | os.PathLike[str], tell: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.tell = Path(folder), tell

    def row_path(self, key: str) -> Path:
        return self.folder / ROWS / f"{key}.json"

    def weights_path(self, key: str) -> Path:
        return self.folder / WEIGHTS / f"{key}.safetensors"

    def initial_path(self, key: str) -> Path:
        return self.folder / WEIGHTS / f"{key}.initial.safetensors"

    def checkpoint_path(self, group: str) -> Path:
        # Workers may stand in another folder.
        return self.folder.absolute() / PARTIAL / f"{group}.safetensors"

    def read_row(self, key: str) -> Row | None:
        """Return the row of a run; None where there is none. A DamageError if it is not what was written."""
        path = self.row_path(key)
        if not has_file(path):
            return None
        try:
            row = row_from_dict(read_json(path, ROW))
        except (ReportError, StudyError) as problem:
            raise DamageError(path, explain_damage(problem)) from problem
        _check_key(path, row.key, key)
        return row

    def write_row(self, row: Row) -> None:
        self._write_bytes(self.row_path(row.key), _dump_json(row_to_dict(row)))

    def read_trained(self, key: str) -> tuple[TrainedNetwork, dict[str, Tensor] | None] | None:
        """Return a trained run, and its weights before training where they were kept; None where there is none.

        A DamageError if a file is not what was written, or was set aside and has not been made again.
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
        """Write weights, those before training first: whoever finds the others finds both."""
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
        """Return whether a checkpoint is there; a DamageError if it is not what was written."""
        path = self.checkpoint_path(group)
        return has_file(path) and bool(load_checkpoint(path))

    def write_table(self, text: str) -> Path:
        return self._write_bytes(self.folder / TABLE, text.encode())

    def read_definition(self) -> dict[str, Any] | None:
        """Return what the folder says of its study; None where it says nothing yet."""
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
        return found

    def write_definition(self, content: Mapping[str, Any]) -> None:
        self._write_bytes(self.folder / DEFINITION, _dump_json(add_digest({"schema": STUDY.schema, **content})))

    def read_or_set_aside(self, read: Callable[[], Found]) -> Found | None:
        """Return what is read, or None where it is damaged: then it is set aside, so that it is made again."""
        try:
            return read()
        except DamageError as damage:
            self.set_aside(damage)
            return None

    def set_aside(self, damage: DamageError) -> None:
        """Rename what is damaged, and tell."""
        path, where = damage.path, ""
        if os.path.lexists(path):
            names = (path.with_name(path.name + ASIDE + (f".{n}" if n else "")) for n in count())
            aside = next(each for each in names if not os.path.lexists(each))
            self._apply_change(lambda: path.replace(aside), path)
            where = f"set aside as {aside.name}, and "
        self.tell(f"{path.name} is damaged ({damage.why}): {where}made again.")

    def remove(self, path: Path) -> None:
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
    """Return whether a file of this name was damaged once."""
    return os.path.lexists(path.with_name(path.name + ASIDE))


def make_write_error(path: Path, problem: BaseException) -> StudyError:
    """The error for a disk that is full or a folder that is closed."""
    cause = problem if isinstance(problem, OSError) else problem.__cause__
    why = cause.strerror if isinstance(cause, OSError) and cause.strerror else format_error_line(problem)
    return StudyError(
        f"Got {str(path)!r}, which cannot be written ({why}). Want a folder with room that may be written to. "
        "Do: free it and give the same command again; everything that was finished is kept, and it goes on from there."
    )


def _check_key(path: Path, found: object, key: str) -> None:
    if found != key:
        raise DamageError(path, f"it is of the run {found!r}")


def _dump_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False, indent=1) + "\n").encode()


def _copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them; what is no tensor is left out."""
    return {
        name: value.detach().cpu().contiguous().clone() for name, value in tensors.items() if isinstance(value, Tensor)
    }
