"""Rows in one compressed file: a thousand of them are many files, and nearly alike."""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from saltflat.errors import StudyError
from saltflat.results.files import replace_atomically
from saltflat.results.text import format_count
from saltflat.studies.row import Row
from saltflat.studies.store.lock import lock_folder
from saltflat.studies.store.rows import DamageError, explain_damage, has_file, row_from_dict

PACKED = "rows.tar.xz"
# A small file can hold any amount of zeros; rows have about 10 kB.
MAX_BYTES = 1 << 30
IS_ROW = re.compile(r"[^/\\]+\.json").fullmatch


class PackedRows:
    """The rows in a study's compressed file, read once.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / PACKED

    @cached_property
    def contents(self) -> Mapping[str, bytes]:
        """Return the text of each row by the key of its run; none if there is no file. Nothing is written to disk."""
        if not has_file(self.path):
            return {}
        found, total = dict[str, bytes](), 0
        try:
            with tarfile.open(self.path, "r:xz") as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.isreg() else None
                    total += member.size
                    if file is None or not IS_ROW(member.name) or total > MAX_BYTES:
                        raise DamageError(self.path, f"it holds {member.name!r}, which is not a row")
                    found[member.name.removesuffix(".json")] = file.read()
        except DamageError:  # a ValueError, too
            raise
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as problem:
            raise DamageError(self.path, explain_damage(problem)) from problem
        return found

    def read_row(self, key: str) -> Row | None:
        """Return the row of a run, None if there is none. Raise a DamageError if the file changed."""
        text = self.contents.get(key)
        return None if text is None else _parse_row(self.path, key, text, f"the row {key!r} in it: ")

    def iter_whole_rows(self) -> Iterator[tuple[str, bytes]]:
        """Yield key and text of each row that is as it was written; none if the file itself cannot be read."""
        with suppress(DamageError):
            for key, text in self.contents.items():
                with suppress(DamageError):
                    self.read_row(key)
                    yield key, text


def _parse_row(path: Path, key: str, text: bytes, where: str = "") -> Row:
    """Return the row of a run; raise a DamageError about the file at this path if the text changed."""
    try:
        content: dict[str, Any] = json.loads(text)
        row = row_from_dict(content)
    except (StudyError, ValueError, RecursionError, AttributeError, TypeError) as problem:
        raise DamageError(path, f"{where}{explain_damage(problem)}") from problem
    if row.key != key:
        raise DamageError(path, f"{where}it is of the run {row.key!r}")
    return row


def pack_rows(folder: str | os.PathLike[str]) -> Path:
    """Move the rows of a study into one compressed file, ``rows.tar.xz``; results are read from it as before.

    The same rows give the same bytes. Rows that are packed already stay, unless there is a newer file of the same run.

    Args:
        folder: folder of a study that no process works on; it is locked meanwhile.

    Returns:
        The path of the file.
    """
    place = Path(folder)
    if not list(place.glob("rows/*.json")) and not os.path.lexists(place / PACKED):
        raise StudyError(f"Expected a folder with rows, but got {os.fspath(folder)!r}. Try a study that was run.")
    try:
        with lock_folder(place):
            return _pack_rows(place)
    except OSError as problem:
        raise StudyError(
            f"Expected a folder that may be written to, but got {os.fspath(folder)!r}, where rows cannot be packed "
            f"({problem}). Try its permissions, then the same again: no row is removed before all are packed."
        ) from problem


def _pack_rows(place: Path) -> Path:
    packed = PackedRows(place)
    contents = dict(packed.contents)
    for key in contents:
        packed.read_row(key)
    files = {path.stem: path for path in sorted((place / "rows").glob("*.json")) if has_file(path)}
    for key, path in files.items():
        contents[key] = path.read_bytes()
        _parse_row(path, key, contents[key])
    with (
        replace_atomically(packed.path, follow_links=False) as part,
        tarfile.open(part, "x:xz", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for key in sorted(contents):
            member = tarfile.TarInfo(f"{key}.json")  # without times and owners
            member.size = len(contents[key])
            archive.addfile(member, io.BytesIO(contents[key]))
    if len(PackedRows(place).contents) != len(contents):
        raise StudyError(f"Expected {format_count(len(contents), 'row')} in {PACKED}, but got others. Try again.")
    for path in files.values():
        path.unlink()
    return packed.path
