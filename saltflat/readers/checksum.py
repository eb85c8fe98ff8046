"""The bytes of a published file, if they are the published ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

from saltflat.errors import DataError


def read_verified_bytes(path: Path, md5: str) -> bytes:
    """What the file holds, if its md5 is this. Against damage; whoever can make a file can make one of any md5."""
    content = read_file_bytes(path)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(
            f"Got {str(path)!r} with the md5 {found} ({len(content):,} bytes). Want {md5}, that of the published file: "
            "this one is damaged, incomplete or another. Do: delete it and download it again."
        )
    return content


def read_file_bytes(path: Path) -> bytes:
    """What the file holds."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _make_unreadable_error(path, error) from error


def is_existing_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have is an error."""
    try:
        return path.is_file()
    except OSError as error:
        raise _make_unreadable_error(path, error) from error


def _make_unreadable_error(path: Path, error: OSError) -> DataError:
    return DataError(
        f"Got {str(path)!r}, which cannot be read ({error.strerror}). Want the file as published. "
        "Do: check the folder and its permissions."
    )


def make_missing_file_error(path: Path, dataset: str) -> DataError:
    """The error for a file that is not there; ``dataset`` is torchvision's name of what it belongs to."""
    return DataError(
        f"Got no file {str(path)!r}. Want {dataset} as torchvision lays it out. Do: name the folder it is in, or "
        f"download it there with torchvision.datasets.{dataset}(folder, download=True)."
    )
