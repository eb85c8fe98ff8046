"""End the command ``saltflat`` without a traceback if Ctrl-C is pressed while it is importing or exiting.

The package imports this module first, since importing torch takes seconds. It does nothing in other programs.
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
    """Let Ctrl-C raise KeyboardInterrupt inside of the context, where the program catches it."""
    quiet = signal.getsignal(signal.SIGINT) is _exit_on_interrupt
    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if quiet:
            signal.signal(signal.SIGINT, _exit_on_interrupt)


def _exit_on_interrupt(number: int, frame: FrameType | None) -> None:
    # Not an exception: libraries that are being imported turn it into other errors.
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def _is_cli_process() -> bool:
    """Return whether this process is ``saltflat`` or ``python -m saltflat``, and not one of its workers."""
    if threading.current_thread() is not threading.main_thread() or not sys.argv or sys.argv[0] not in sys.orig_argv:
        return False
    if sys.argv[0] == "-m":  # while Python is looking for the module to run
        return "saltflat" in sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]
    return Path(sys.argv[0]).stem == "saltflat"


if _is_cli_process() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit_on_interrupt)
