"""One process at a time writes into a study's folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from saltflat.errors import StudyError

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside of it the folder is ours. A process that dies, however, gives it back: the system sees to that."""
    import fcntl  # here, so that a study can be read where there is no such thing

    # Not cut when it is opened: the words of whoever holds the lock must stay until the lock is ours.
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise StudyError(
                f"Got the folder {str(folder)!r}, which {holder(folder)} is working in. Want it to be free. "
                "Do: wait for it, stop it, or give another folder."
            ) from problem
        os.ftruncate(file, 0)
        os.write(file, json.dumps(_self()).encode())
        yield
    finally:
        os.close(file)


def holder(folder: Path) -> str:
    """Who has the lock, or had it last, in words."""
    try:
        found = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        return f"process {found['process']} on {found['machine']} (since {found['since']})"
    except (OSError, ValueError, KeyError, TypeError):  # just begun, and not yet written
        return "another process"


def is_locked(folder: Path) -> bool:
    """Whether a process is working in the folder now."""
    import fcntl

    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that two who ask at once do not see each other.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _self() -> dict[str, object]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"process": os.getpid(), "machine": platform.node(), "since": since}
