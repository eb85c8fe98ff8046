"""The folder of a study: every file in it is whole, and nothing that was finished is ever lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from saltflat.errors import ReportError, SaltflatError, StudyError, first_line
from saltflat.report.file import Form, read, replacing
from saltflat.studies.checksum import checksum
from saltflat.studies.row import Row
from saltflat.studies.row_file import ROW, row_from_dict, row_to_dict

STUDY = Form("saltflat.study/1", "a study", "Study.run")
DEFINITION, TABLE = "study.json", "table.csv"
ROWS, WEIGHTS, PARTIAL = "rows", "weights", "partial"
FOLDERS = (ROWS, WEIGHTS, PARTIAL)
CHECKSUM = "checksum"
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

    def checkpoint(self, group: str) -> Path:
        # Workers may stand in another folder.
        return self.folder.absolute() / PARTIAL / f"{group}.safetensors"

    def row(self, key: str) -> Row | None:
        """The row of a run; None where there is none. A row that is damaged is an error."""
        path = self.row_path(key)
        if not path.exists():
            return None
        row = row_from_dict(read(path, ROW))
        if row.key != key:
            raise StudyError(f"Got the row of {row.key!r} in {str(path)!r}. Want that of {key!r}. Do: make it again.")
        return row

    def write_row(self, row: Row) -> None:
        self._write(self.row_path(row.key), _json(row_to_dict(row)))

    def weights(self, key: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Weights and what was written beside them; None where there are none. A damaged file is an error."""
        return self._tensors(self.weights_path(key))

    def initial(self, key: str) -> dict[str, Tensor] | None:
        """Weights before training, where they were kept."""
        found = self._tensors(self.initial_path(key))
        return None if found is None else found[0]

    def has_weights(self, key: str) -> bool:
        """Whether weights are there, whole and as they were written; a file that is not is an error."""
        found = self._tensors(self.weights_path(key))
        if found is not None and "outcome" not in found[1]:
            raise StudyError(
                f"Got {str(self.weights_path(key))!r} without an outcome. Want weights that Study.run wrote."
            )
        return found is not None

    def write_weights(
        self,
        key: str,
        weights: Mapping[str, Tensor],
        metadata: Mapping[str, str],
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write weights, those before training first: whoever finds the others finds both."""
        if initial is not None:
            before = _apart(initial)
            self._write(self.initial_path(key), save(before, {CHECKSUM: checksum(before)}))
        own = _apart(weights)
        self._write(self.weights_path(key), save(own, {**metadata, CHECKSUM: checksum(own)}))

    def write_table(self, text: str) -> Path:
        return self._write(self.folder / TABLE, text.encode())

    def definition(self) -> dict[str, Any] | None:
        """What the folder says of its study; None where it says nothing yet."""
        path = self.folder / DEFINITION
        if not path.exists():
            return None
        found = read(path, STUDY)
        kinds = {"study": dict, "data": dict, "keys": list}
        wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
        if wrong or not isinstance(found["study"].get("name"), str):
            raise StudyError(
                f"Got the file {str(path)!r}, whose {wrong[0] if wrong else 'study'!r} is missing or of another kind. "
                "Want a study as Study.run wrote it. Do: give saltflat study run again; it makes the file anew."
            )
        return found

    def write_definition(self, content: Mapping[str, Any]) -> None:
        self._write(self.folder / DEFINITION, _json({"schema": STUDY.schema, **content}))

    def kept(self, read: Callable[[str], Found], key: str, path: Path) -> Found | None:
        """What is read, or None: a damaged file is told and set aside, so that it is made again."""
        try:
            return read(key)
        except (SaltflatError, SafetensorError, ValueError) as problem:
            aside = path.with_name(path.name + ".damaged")
            self._changed(lambda: path.replace(aside), path)
            why = first_line(problem.__cause__ or problem)
            self.tell(f"{path.name} is damaged ({why}): set aside as {aside.name}, and made again.")
            return None

    def remove(self, path: Path) -> None:
        self._changed(lambda: path.unlink(missing_ok=True), path)

    def _tensors(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        if not path.exists():
            return None
        with _opened(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = dict(file.metadata() or {})
        if told.get(CHECKSUM, "") not in ("", checksum(tensors)):
            raise StudyError(
                f"Got {str(path)!r}, whose numbers are not those that were written. Want what Study.run wrote. "
                "Do: run the study again, which makes it anew."
            )
        return tensors, told

    def _write(self, path: Path, content: bytes) -> Path:
        def written() -> None:
            with replacing(path) as part, part.open("xb") as file:
                file.write(content)
            # The new name is in the folder, which has to reach the disk as well.
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

        self._changed(written, path)
        return path

    def _changed(self, change: Callable[[], object], path: Path) -> None:
        try:
            change()
        except (OSError, ReportError) as problem:
            raise unwritable(path, problem) from problem


def unwritable(path: Path, problem: BaseException) -> StudyError:
    """The error for a disk that is full or a folder that is closed."""
    cause = problem if isinstance(problem, OSError) else problem.__cause__
    why = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_line(problem)
    return StudyError(
        f"Got {str(path)!r}, which cannot be written ({why}). Want a folder with room that may be written to. "
        "Do: free it and give the same command again; everything that was finished is kept, and it goes on from there."
    )


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False, indent=1) + "\n").encode()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them; what is no tensor is left out."""
    return {
        name: value.detach().cpu().contiguous().clone() for name, value in tensors.items() if isinstance(value, Tensor)
    }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of tensors; one that is no whole file is an error of ours."""
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as problem:
        raise StudyError(
            f"Got {str(path)!r}, which is no whole file of weights ({problem}). Want what Study.run wrote. "
            "Do: run the study again, which makes it anew."
        ) from problem
