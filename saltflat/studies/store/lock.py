"""Lock a study's folder, so that one process at a time writes into it."""

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
PATIENCE = 30.0  # seconds to wait for readers that hold a shared lock
# Open files whose locks this process holds. The system releases a lock when the last copy of the file is closed.
_held: set[int] = set()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder inside the block. The system releases it if the process dies."""
    # Not truncated when opened: the description of the holder must stay until the lock is ours.
    file = _open_lock_file(folder, os.O_RDWR | os.O_CREAT)
    _held.add(file)
    try:
        if not _acquire_lock(file):
            raise StudyError(
                f"Expected a folder that no process uses, but got {str(folder)!r}, which {format_lock_holder(folder)} "
                "is working in. Try waiting for it, stopping it, or another folder."
            )
        os.ftruncate(file, 0)
        os.write(file, json.dumps(_describe_process()).encode())
        yield
    finally:
        if file in _held:  # else this is a child of the process that took the lock
            _held.discard(file)
            os.close(file)


def format_lock_holder(folder: Path) -> str:
    """Return a description of the process that holds the lock, or held it last."""
    try:
        with os.fdopen(_open_lock_file(folder, os.O_RDONLY), encoding="utf-8") as file:
            found = json.load(file)
        return f"process {found['process']} on {found['machine']} (since {found['since']})"
    except (OSError, StudyError, ValueError, KeyError, TypeError):  # just begun, and not yet written
        return "another process"


def is_locked(folder: Path) -> bool:
    """Return whether a process is working in the folder now."""
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
    """Acquire the lock unless a study holds it; return whether it was acquired.

    Readers, see :func:`is_locked`, share it for a moment; it waits for them.
    """
    until = time.monotonic() + PATIENCE
    while not _try_flock(file, exclusive=True):
        if not _try_flock(file, exclusive=False) or time.monotonic() > until:
            return False
        _release_lock(file)
        time.sleep(random.uniform(0.001, 0.01))  # out of step with another study that is starting
    return True


def _try_flock(file: int, *, exclusive: bool) -> bool:
    """Try to acquire the lock without waiting; return whether it was acquired."""
    import fcntl  # here, so that a study can be read on systems without it

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release_lock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def _close_inherited_locks() -> None:
    """Close a child's copies, which would keep the lock when its parent dies."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


def _describe_process() -> dict[str, object]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"process": os.getpid(), "machine": platform.node(), "since": since}
