"""Work, tasks and results as bytes, on their way between processes.

Plain pickles: torch's own way between processes keeps an open file for every tensor, and a few hundred are too many.
"""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

import torch

from saltflat.errors import format_error_line
from saltflat.studies.executors.executor import Failure, attempt_task, make_failure

KEPT = 4  # works that either side remembers: training and measuring, and as many again
Dumps = Callable[[Any], bytes]


@dataclass(frozen=True, eq=False)
class PackedWork:
    """Work that is sent to a worker once and then called by its number."""

    work: Callable[[Any], Any]
    number: str
    content: bytes


class WorkPacker:
    """Packs each work once, as long as it is among the last few."""

    def __init__(self, dumps: Dumps = pickle.dumps) -> None:
        self._dumps = dumps
        self._recent: deque[PackedWork] = deque(maxlen=KEPT)

    def pack(self, work: Callable[[Any], Any]) -> PackedWork:
        for parcel in self._recent:
            if parcel.work is work:
                return parcel
        self._recent.append(PackedWork(work, uuid4().hex, self._dumps(work)))
        return self._recent[-1]


class TaskRunner:
    """On the worker's side: unpacks each work once, as long as it is among the last few, and does it."""

    def __init__(self, dumps: Dumps = pickle.dumps) -> None:
        self._dumps = dumps
        self._works: dict[str, Callable[[Any], Any]] = {}

    def run_task(self, number: str, content: bytes | None, task: bytes) -> bytes:
        """The packed result or Failure. ``content`` may be None where the work was sent before."""
        try:
            work, unpacked = self._unpack_work(number, content), pickle.loads(task)
        except Exception as error:
            return self._dumps(make_import_failure(format_error_line(error), make_failure(error).traceback))
        # A worker is not the study: sys.exit in a train function ends its run, not the worker.
        result = attempt_task(work, unpacked, catch=(Exception, SystemExit))
        try:
            return self._dumps(result)
        except Exception as error:
            return self._dumps(_make_result_failure(error))

    def _unpack_work(self, number: str, content: bytes | None) -> Callable[[Any], Any]:
        if number not in self._works:
            assert content is not None
            while len(self._works) >= KEPT:
                del self._works[next(iter(self._works))]
            self._works[number] = pickle.loads(content)
        return self._works[number]


def unpack_result(content: bytes) -> Any:
    """What the worker answered."""
    try:
        return pickle.loads(content)
    except Exception as error:
        return _make_result_failure(error)


def make_send_failure(error: Exception) -> Failure:
    """Of a task or work that cannot be packed."""
    return Failure(
        "Expected an importable function, but got work or a task that cannot be sent to another process: "
        f'{format_error_line(error)}. Try putting it at the top of a module and name it "package.module:function", '
        "or using executor='here'.",
        make_failure(error).traceback,
    )


def make_import_failure(error: str, traceback: str) -> Failure:
    """Of a task or work that cannot be unpacked where it arrives."""
    return Failure(
        f"Expected an importable function, but got work or a task that a worker process cannot import: {error}. Try "
        "putting it into a module that can be imported there, \"package.module:function\", or using executor='here'.",
        traceback,
    )


def _make_result_failure(error: Exception) -> Failure:
    return Failure(
        "Expected one that can be pickled, but got a result that cannot be sent to another process: "
        f"{format_error_line(error)}. Try returning tensors, numbers, text, or dataclasses of these at the top of a "
        "module; or using executor='here'.",
        make_failure(error).traceback,
    )


def serve_tasks(connection: Connection, threads: int) -> None:
    """Answer one task after another until the other side is gone."""
    # Ctrl-C reaches every process of the terminal. The parent decides what it means, and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # fewer where OMP_NUM_THREADS says so
    inbox = TaskRunner()
    try:
        connection.send_bytes(b"ready")
        while True:
            number, content, task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(inbox.run_task(number, content, task))
    except (EOFError, OSError):
        return
