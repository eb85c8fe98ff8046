"""Ctrl-C while the command ``saltflat`` is still importing, or already leaving: no traceback from the middle of that.

Imported first by the package, since torch alone takes seconds. Does nothing in other programs that import saltflat.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def raise_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt inside of it, where the program catches that."""
    quiet = signal.getsignal(signal.SIGINT) is _exit_on_interrupt
    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if quiet:
            signal.signal(signal.SIGINT, _exit_on_interrupt)


def _exit_on_interrupt(number: int, frame: FrameType | None) -> None:
    # Not an exception: libraries that are being imported turn those into errors of their own.
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def _is_cli_process() -> bool:
    """Whether this process is ``saltflat`` or ``python -m saltflat``, and not one of its workers."""
    if threading.current_thread() is not threading.main_thread() or not sys.argv or sys.argv[0] not in sys.orig_argv:
        return False
    if sys.argv[0] == "-m":  # so it is while Python looks for the module to run
        return "saltflat" in sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]
    return Path(sys.argv[0]).stem == "saltflat"


if _is_cli_process() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit_on_interrupt)
