"""Rows in one compressed file: a thousand of them are many files, and nearly alike."""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from saltflat.errors import StudyError
from saltflat.results.files import replace_atomically
from saltflat.results.text import format_count
from saltflat.studies.row import Row
from saltflat.studies.store.rows import DamageError, explain_damage, row_from_dict

PACKED = "rows.tar.xz"
# A small file can hold any amount of zeros; rows have about 10 kB.
MAX_BYTES = 1 << 30


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
        if not os.path.lexists(self.path):
            return {}
        found, total = dict[str, bytes](), 0
        try:
            with tarfile.open(self.path, "r:xz") as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.isreg() else None
                    total += member.size
                    if file is None or not member.name.endswith(".json") or total > MAX_BYTES:
                        raise DamageError(self.path, f"it holds {member.name!r}, which is not a row")
                    found[member.name.removesuffix(".json")] = file.read()
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as problem:
            raise DamageError(self.path, explain_damage(problem)) from problem
        return found

    def read_row(self, key: str) -> Row | None:
        """Return the row of a run, None if there is none. Raise a DamageError if the file changed."""
        text = self.contents.get(key)
        if text is None:
            return None
        try:
            content: dict[str, Any] = json.loads(text)
            row = row_from_dict(content)
        except (StudyError, ValueError, RecursionError, AttributeError, TypeError) as problem:
            raise DamageError(self.path, f"the row {key!r} in it: {explain_damage(problem)}") from problem
        if row.key != key:
            raise DamageError(self.path, f"the row {key!r} in it is of the run {row.key!r}")
        return row


def pack_rows(folder: str | os.PathLike[str]) -> Path:
    """Move the rows of a study into one compressed file, ``rows.tar.xz``; results are read from it as before.

    The same rows give the same bytes. Rows that are packed already stay, unless there is a newer file of the same run.

    Args:
        folder: folder of a study that no process works on.

    Returns:
        The path of the file.
    """
    place = Path(folder)
    files = {path.stem: path for path in sorted((place / "rows").glob("*.json"))}
    packed = PackedRows(place)
    contents = {**packed.contents, **{key: path.read_bytes() for key, path in files.items()}}
    if not contents:
        raise StudyError(f"Expected a folder with rows, but got {os.fspath(folder)!r}. Try a study that was run.")
    for key, text in contents.items():
        row_from_dict(json.loads(text))
        if json.loads(text)["key"] != key:
            raise StudyError(f"Expected the row {key!r}, but got another in its file. Try saltflat study verify first.")
    with replace_atomically(packed.path) as part, tarfile.open(part, "x:xz", format=tarfile.USTAR_FORMAT) as archive:
        for key in sorted(contents):
            member = tarfile.TarInfo(f"{key}.json")  # without times and owners
            member.size = len(contents[key])
            archive.addfile(member, io.BytesIO(contents[key]))
    if len(PackedRows(place).contents) != len(contents):
        raise StudyError(f"Expected {format_count(len(contents), 'row')} in {PACKED}, but got others. Try again.")
    for path in files.values():
        path.unlink()
    return packed.path
