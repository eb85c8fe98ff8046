"""One process at a time writes into a study's folder."""

from __future__ import annotations

import errno
import json
import os
import platform
import random
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from saltflat.errors import StudyError

LOCK = ".lock"
PATIENCE = 30.0  # seconds that somebody who only looks may keep a study from beginning
# Open files whose locks this process holds. The system gives a lock back when the last copy of the file is closed.
_held: set[int] = set()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Inside of it the folder is ours. A process that dies, however, gives it back: the system sees to that."""
    # Not cut when it is opened: the words of whoever holds the lock must stay until the lock is ours.
    file = _open_lock_file(folder, os.O_RDWR | os.O_CREAT)
    _held.add(file)
    try:
        if not _acquire_lock(file):
            raise StudyError(
                f"Expected it to be free, but got the folder {str(folder)!r}, which {format_lock_holder(folder)} is "
                "working in. Try waiting for it, stop it, or giving another folder."
            )
        os.ftruncate(file, 0)
        os.write(file, json.dumps(_describe_process()).encode())
        yield
    finally:
        if file in _held:  # else this is a child of the process that took the lock
            _held.discard(file)
            os.close(file)


def format_lock_holder(folder: Path) -> str:
    """Who has the lock, or had it last, in words."""
    try:
        with os.fdopen(_open_lock_file(folder, os.O_RDONLY), encoding="utf-8") as file:
            found = json.load(file)
        return f"process {found['process']} on {found['machine']} (since {found['since']})"
    except (OSError, StudyError, ValueError, KeyError, TypeError):  # just begun, and not yet written
        return "another process"


def is_locked(folder: Path) -> bool:
    """Whether a process is working in the folder now."""
    try:
        file = _open_lock_file(folder, os.O_RDONLY)
    except (OSError, StudyError):
        return False
    try:
        return not _try_flock(file, exclusive=False)
    finally:
        os.close(file)


def _open_lock_file(folder: Path, flags: int) -> int:
    """Open the file of the lock; a link, a folder or a pipe in its place is refused, not followed or waited for."""
    path = folder / LOCK
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _make_lock_file_error(path) from problem
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _make_lock_file_error(path)
    return file


def _make_lock_file_error(path: Path) -> StudyError:
    return StudyError(
        f"Expected {str(path)!r} to be a regular file, but it is not. Try removing it: the next run makes it again."
    )


def _acquire_lock(file: int) -> bool:
    """Take the lock, unless a study has it.

    Those who only look, see :func:`is_locked`, share it for a moment. They do not count, and are waited for.
    """
    until = time.monotonic() + PATIENCE
    while not _try_flock(file, exclusive=True):
        if not _try_flock(file, exclusive=False) or time.monotonic() > until:
            return False
        _release_lock(file)
        time.sleep(random.uniform(0.001, 0.01))  # not in step with another study that wants to begin
    return True


def _try_flock(file: int, *, exclusive: bool) -> bool:
    """Return whether the lock could be had at once."""
    import fcntl  # here, so that a study can be read where there is no such thing

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release_lock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def _close_inherited_locks() -> None:
    """Close the copies of a child, which would keep the lock when its parent is dead."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


def _describe_process() -> dict[str, object]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"process": os.getpid(), "machine": platform.node(), "since": since}
