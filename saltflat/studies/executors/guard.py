"""A process that ends others when the process that started it is gone.

A process that is killed cannot stop its workers, and a worker cannot always notice that it is alone: it may be
importing modules, or be inside a call that holds Python's lock. A guard only waits, so it can always act. It runs this
file as a program of its own, which imports only the standard library and starts in hundredths of a second.
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

POLL_INTERVAL = 0.2  # seconds between checks of the parent, in case its fork holds the pipe open
KILL_ROUNDS = 50  # a process that is killed may have started another one just before


class ProcessGuard:
    """Kill the watched processes, and all processes of their sessions, when this process ends for any reason."""

    def __init__(self) -> None:
        # Without site-packages and the environment, so that no user code runs in it. In a session of its own, so that
        # Ctrl-C in a terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Start watching a process."""
        self._send(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Stop watching a process."""
        self._send(f"-{pid}\n")

    def close(self) -> None:
        """Kill the processes that are still watched."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # someone killed it; the workers run without it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _main() -> None:
    parent, watched = int(sys.argv[1]), set[int]()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_INTERVAL)
        _kill_processes(watched)
        os._exit(0)

    threading.Thread(target=watch_parent, daemon=True).start()
    for line in sys.stdin:
        pid = int(line[1:])
        (watched.add if line[0] == "+" else watched.discard)(pid)
    _kill_processes(watched)


def _kill_processes(watched: Set[int]) -> None:
    for _ in range(KILL_ROUNDS):
        found = list(_find_living_processes(watched))
        for pid in found:
            with suppress(OSError):
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        if not found:
            return
        time.sleep(0.01)


def _find_living_processes(watched: Set[int]) -> Iterator[int]:
    """Yield the watched processes and, on Linux, those of their sessions."""
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
