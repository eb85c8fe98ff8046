"""Pack work, tasks and results as bytes that are sent between processes, and run them in a worker.

Plain pickles are used: torch's own transfer between processes keeps a file open for each tensor, and a few hundred
exceed the limit of open files.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

import torch

from saltflat.errors import format_error_line
from saltflat.studies.executors.executor import Failure, attempt_task, make_failure

MAX_WORKS = 4  # that sender and receiver remember: training and measuring, and as many again
Dumps = Callable[[Any], bytes]


@dataclass(frozen=True, eq=False)
class PackedWork:
    """A pickled function that is sent to a worker once and later referred to by its id."""

    work: Callable[[Any], Any]
    work_id: str
    content: bytes


class WorkPacker:
    """Pickle each work once, as long as it is among the most recent ones."""

    def __init__(self, dumps: Dumps = pickle.dumps) -> None:
        self._dumps = dumps
        self._recent: deque[PackedWork] = deque(maxlen=MAX_WORKS)

    def pack(self, work: Callable[[Any], Any]) -> PackedWork:
        """Return the packed work, pickled now if it is not among the most recent ones."""
        for packed in self._recent:
            if packed.work is work:
                return packed
        self._recent.append(PackedWork(work, uuid4().hex, self._dumps(work)))
        return self._recent[-1]


class SentWorks:
    """Track the works that a receiver still remembers."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque(maxlen=MAX_WORKS)

    def get_unsent_content(self, work: PackedWork) -> bytes | None:
        """Return the bytes to send along with a task; None if the receiver has them."""
        if work.work_id in self._ids:
            return None
        self._ids.append(work.work_id)
        return work.content

    def clear(self) -> None:
        """Forget all works, so that each one is sent again."""
        self._ids.clear()


class TaskRunner:
    """Run packed tasks in a worker; each work is unpickled once, as long as it is among the most recent ones."""

    def __init__(self, dumps: Dumps = pickle.dumps) -> None:
        self._dumps = dumps
        self._works: dict[str, Callable[[Any], Any]] = {}

    def run_task(self, work_id: str, content: bytes | None, task: bytes) -> bytes:
        """Return the packed result or Failure. ``content`` may be None if the work was sent before."""
        try:
            work, unpacked = self._unpack_work(work_id, content), pickle.loads(task)
        except Exception as error:
            return self._dumps(make_import_failure(format_error_line(error), make_failure(error).traceback))
        # sys.exit in a train function ends its run, not the worker.
        result = attempt_task(work, unpacked, catch=(Exception, SystemExit))
        try:
            return self._dumps(result)
        except Exception as error:
            return self._dumps(_make_result_failure(error))

    def _unpack_work(self, work_id: str, content: bytes | None) -> Callable[[Any], Any]:
        if work_id not in self._works:
            assert content is not None
            while len(self._works) >= MAX_WORKS:
                del self._works[next(iter(self._works))]
            self._works[work_id] = pickle.loads(content)
        return self._works[work_id]


def unpack_result(content: bytes) -> Any:
    """Return the result in a worker's answer, or a Failure if it cannot be unpickled."""
    try:
        return pickle.loads(content)
    except Exception as error:
        return _make_result_failure(error)


def make_send_failure(error: Exception) -> Failure:
    """Return the failure of a task or work that cannot be pickled."""
    return Failure(
        "Expected an importable function, but got work or a task that cannot be sent to another process: "
        f'{format_error_line(error)}. Try putting it at the top of a module, named as "package.module:function", '
        "or use executor='serial'.",
        make_failure(error).traceback,
    )


def make_import_failure(error: str, traceback: str) -> Failure:
    """Return the failure of a task or work that a worker cannot unpickle."""
    return Failure(
        f"Expected an importable function, but got work or a task that a worker process cannot import: {error}. Try "
        'putting it into a module that can be imported there, named as "package.module:function", or use '
        "executor='serial'.",
        traceback,
    )


def _make_result_failure(error: Exception) -> Failure:
    return Failure(
        "Expected a result that can be pickled, but got a result that cannot be sent to another process: "
        f"{format_error_line(error)}. Try returning tensors, numbers, text, or dataclasses of these at the top of a "
        "module; or use executor='serial'.",
        make_failure(error).traceback,
    )


def serve_tasks(connection: Connection, threads: int) -> None:
    """Run tasks from the connection, one after another, until its other end is closed."""
    # Ctrl-C reaches every process of the terminal. The parent decides what it means, and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # fewer if OMP_NUM_THREADS is set
    runner = TaskRunner()
    try:
        connection.send_bytes(b"ready")
        while True:
            work_id, content, task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(runner.run_task(work_id, content, task))
    except (EOFError, OSError):
        return


def run_remote_task(threads: int, work_id: str, work: bytes, task: bytes, timeout: float | None, mark: str) -> bytes:
    """Return the packed result of a task inside a Ray worker, with as many threads as the cores it requested.

    Only this process knows when the work started. At the time limit it leaves a mark for the driver and exits.
    """
    torch.set_num_threads(threads)
    if timeout is None:
        return _get_ray_task_runner().run_task(work_id, work, task)
    clock = threading.Timer(min(timeout, threading.TIMEOUT_MAX), _exit_with_mark, (mark,))
    clock.daemon = True
    clock.start()
    try:
        return _get_ray_task_runner().run_task(work_id, work, task)
    finally:
        clock.cancel()


def _exit_with_mark(mark: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    try:
        _internal_kv_put(mark, b"")
    finally:
        os._exit(1)


@cache
def _get_ray_task_runner() -> TaskRunner:
    """Return the runner of this process, to which Ray gives many tasks."""
    from ray import cloudpickle

    return TaskRunner(cloudpickle.dumps)
