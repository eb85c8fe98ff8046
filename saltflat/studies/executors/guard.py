"""A process that ends others when the one that started it is gone.

A process that is killed cannot stop its workers, and a worker cannot always notice that it is alone: it may be
importing modules, or be inside of a call that holds Python's lock. A guard does nothing but wait, so it can always act.
Its program is this file, run by itself: it imports the standard library only, and starts in hundredths of a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

LOOK_EVERY = 0.2  # seconds between looks at the parent, for pipes that a fork of the parent holds open
ROUNDS = 50  # a process that is being killed may have started another one just before


class ProcessGuard:
    """Kills the processes it watches, and all processes of their sessions, when this process ends in whatever way."""

    def __init__(self) -> None:
        # Without site-packages and the environment: nothing of the user's is run in it. In a session of its own: Ctrl-C
        # in a terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        self._send(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        self._send(f"-{pid}\n")

    def close(self) -> None:
        """Kill what is still watched."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody killed it; the workers do their work without
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _main() -> None:
    parent, watched = int(sys.argv[1]), set[int]()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY)
        _kill_processes(watched)
        os._exit(0)

    threading.Thread(target=watch_parent, daemon=True).start()
    for line in sys.stdin:
        pid = int(line[1:])
        (watched.add if line[0] == "+" else watched.discard)(pid)
    _kill_processes(watched)


def _kill_processes(watched: Set[int]) -> None:
    for _ in range(ROUNDS):
        found = list(_find_living_processes(watched))
        for pid in found:
            with suppress(OSError):
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        if not found:
            return
        time.sleep(0.01)


def _find_living_processes(watched: Set[int]) -> Iterator[int]:
    """The processes that are watched, and, on Linux, those of their sessions."""
    if not Path("/proc/self/stat").exists():
        yield from watched
        return
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            state, _, _, session = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
            pid = int(stat.parent.name)
            if state not in "ZX" and (pid in watched or int(session) in watched):
                yield pid


if __name__ == "__main__":
    _main()
