"""Tasks in worker processes of this machine."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from saltflat.errors import OptionError
from saltflat.studies.executors.executor import Executor, Session, Task
from saltflat.studies.executors.failure import RETRIES, ExecutorError, closed, died
from saltflat.studies.executors.parcels import KEPT, Outbox, Parcel, not_sent, unpacked_result
from saltflat.studies.executors.worker import serve

STARTS = 3  # so many workers in a row may die before they are ready


class Processes(Executor):
    """In local worker processes, as many at a time as there are cores, or ``workers``; each has its share of threads.

    A worker that dies (killed, out of memory) takes only its task with it, which is tried again, three times in all.
    When this process ends, in whatever way, its workers do too. What a task says of its resources is not looked at.
    A script that uses it needs ``if __name__ == "__main__":`` around what it does, since workers import it.
    """

    name = "processes"

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            raise OptionError(
                f"Got workers={workers!r}. Want a whole number from 1. Do: leave it out for one per core."
            )
        self.workers = workers or cores()

    def open(self) -> Session:
        return _Session(self.workers)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Job:
    def __init__(self, task: Task, parcel: Parcel, content: bytes) -> None:
        self.task, self.parcel, self.content, self.tries = task, parcel, content, 0


class _Worker:
    def __init__(self, threads: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        # Spawned, never forked: a fork copies torch's locks without the threads that would open them.
        self.process = SpawnProcess(target=serve, args=(theirs, threads))
        with _interrupts_later():
            self.process.start()
        theirs.close()  # else we would not see the end of the pipe when the worker dies
        self.ready = False
        self.job: _Job | None = None
        self.knows: deque[str] = deque(maxlen=KEPT)  # the same works that its Inbox keeps

    def give(self, job: _Job) -> None:
        self.job, number = job, job.parcel.number
        content = None if number in self.knows else job.parcel.content
        if content is not None:
            self.knows.append(number)
        self.connection.send_bytes(pickle.dumps((number, content, job.content)))

    def heard(self) -> bytes:
        # Its last words first: it may have answered and died then.
        if not self.connection.poll():
            raise EOFError
        return self.connection.recv_bytes()


class _Session(Session):
    def __init__(self, workers: int) -> None:
        self._most, self._threads = workers, max(1, cores() // workers)
        self._outbox = Outbox()
        self._waiting: deque[_Job] = deque()
        self._done: deque[tuple[Task, Any]] = deque()
        self._workers: list[_Worker] = []
        self._died_starting = 0
        self._open = True
        atexit.register(self._close)  # of a session that nobody closed: Python would wait for the workers for ever

    @property
    def at_once(self) -> int:
        return 2 * self._most  # the next task is there when a worker is free

    def __exit__(self, *error: object) -> None:
        self._close()

    def submit(self, task: Task, work: Callable[[Any], Any], *, soon: bool = False) -> None:
        if not self._open:
            raise closed(task.key)
        try:
            job = _Job(task, self._outbox.parcel(work), pickle.dumps(task))
        except Exception as error:
            self._done.append((task, not_sent(error)))
            return
        (self._waiting.appendleft if soon else self._waiting.append)(job)
        self._hand_out()

    def finished(self) -> Iterator[tuple[Any, Any]]:
        while True:
            self._hand_out()
            if self._done:
                yield self._done.popleft()
            elif any(worker.job for worker in self._workers) or self._waiting:
                self._listen()
            else:
                return

    def _hand_out(self) -> None:
        for worker in [each for each in self._workers if each.ready and not each.job]:
            if self._waiting:
                try:
                    worker.give(self._waiting.popleft())
                except OSError:
                    self._bury(worker)
        starting = sum(not worker.ready for worker in self._workers)
        for _ in range(min(len(self._waiting) - starting, self._most - len(self._workers))):
            self._workers.append(_Worker(self._threads))

    def _listen(self) -> None:
        """Wait until a worker says something or dies."""
        said = set(wait([each for worker in self._workers for each in (worker.connection, worker.process.sentinel)]))
        for worker in [each for each in self._workers if said & {each.connection, each.process.sentinel}]:
            try:
                message = worker.heard()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            if worker.job:
                self._done.append((worker.job.task, unpacked_result(message)))
                worker.job = None
            worker.ready, self._died_starting = True, 0

    def _bury(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        how = _how(worker.process.exitcode)
        worker.connection.close()
        if worker.job:
            worker.job.tries += 1
            if worker.job.tries > RETRIES:
                self._done.append((worker.job.task, died(how)))
            else:
                self._waiting.appendleft(worker.job)
        elif not worker.ready:
            self._died_starting += 1
            if self._died_starting >= STARTS:
                raise ExecutorError(
                    f"Got {STARTS} worker processes in a row that {how} while they started. Want workers that start. "
                    'Do: put what the script does under `if __name__ == "__main__":`, see what they print, '
                    "or use executor='here'."
                )

    def _close(self) -> None:
        self._open = False
        atexit.unregister(self._close)
        for worker in self._workers:
            if worker.job or not worker.ready:
                worker.process.kill()
            worker.connection.close()  # which tells those without a task to go
        for worker in self._workers:
            worker.process.join(5.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()
        self._waiting.clear()


def _how(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was ended by {name}" + (" (often: the machine ran out of memory)" if name == "SIGKILL" else "")


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """A worker inherits that SIGINT is held back, until it has said that it ignores it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starts with the first worker otherwise, and lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
