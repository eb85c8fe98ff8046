"""Run tasks in worker processes of this machine."""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from saltflat.errors import OptionError, format_error_line
from saltflat.studies.executors.executor import (
    TRIES,
    Executor,
    ExecutorError,
    Session,
    Task,
    make_closed_session_error,
    make_death_failure,
    make_loss_error,
    make_timeout_failure,
)
from saltflat.studies.executors.guard import ProcessGuard
from saltflat.studies.executors.pickling import (
    KEPT,
    PackedWork,
    WorkPacker,
    make_send_failure,
    serve_tasks,
    unpack_result,
)


@dataclass(eq=False)
class Job:
    """A task, packed.

    Attributes:
        task: as it was handed in.
        parcel: the work to do with it.
        content: the task as bytes.
        timeout: seconds that the work may take; None for no limit.
        deaths: how many workers died with it.
        losses: how often a machine or an object of a cluster was lost with it.
    """

    task: Task
    parcel: PackedWork
    content: bytes
    timeout: float | None = None
    deaths: int = 0
    losses: int = 0


class JobQueue:
    """Jobs that wait, in the order they are to be done, and results that nobody has taken yet.

    The death of a worker says little about its task: the system may have killed it for memory that other tasks took.
    So a task whose worker died is tried again, the last time after all others and with none beside it. If that worker
    dies too, it is the task that ends it.
    """

    def __init__(self) -> None:
        self.done: deque[tuple[Task, Any]] = deque()
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._alone = False

    def add(self, job: Job, soon: bool) -> None:
        (self._waiting.appendleft if soon else self._waiting.append)(job)

    def clear(self) -> None:
        self._waiting.clear()
        self._suspects.clear()

    def count_ready(self, running: int) -> int:
        """How many jobs may begin now, beside those that run."""
        if self._alone and running:
            return 0
        # A result that is not taken yet may bring further tasks, which come before suspects.
        return len(self._waiting) or int(bool(self._suspects) and not running and not self.done)

    def pop_next(self) -> Job:
        """The first of those that are ready."""
        self._alone = not self._waiting
        return self._waiting.popleft() if self._waiting else self._suspects.popleft()

    def finish(self, job: Job, result: Any) -> None:
        self.done.append((job.task, result))

    def record_death(self, job: Job, how: str) -> None:
        """Take back a job whose worker died; how it did, in words that follow "a worker process that"."""
        job.deaths += 1
        if job.deaths >= TRIES:
            self.finish(job, make_death_failure(how))
        else:
            self.retry(job)

    def retry(self, job: Job) -> None:
        """Take back a job that is to be tried once more."""
        if job.deaths == TRIES - 1:
            self._suspects.append(job)
        else:
            self._waiting.appendleft(job)


STARTS = 3  # so many workers in a row may die before they are ready
LONGEST_WAIT = 3600.0  # seconds; the system refuses to wait for weeks at once


class ProcessExecutor(Executor):
    """In local worker processes, as many at a time as there are cores, or ``workers``; each has its share of threads.

    A worker that dies (killed, out of memory) takes only its task with it, which is tried three times in all, the last
    time with no other task beside it. When this process ends, in whatever way, its workers do too, within a second.
    What a task says of its resources is not looked at.
    A script that uses it needs ``if __name__ == "__main__":`` around what it does, since workers import it.
    """

    name = "processes"

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            raise OptionError(
                f"Expected a whole number from 1, but got workers={workers!r}. Try leaving it out for one per core."
            )
        self.workers = workers or count_cores()

    def open_session(self) -> Session:
        return _ProcessSession(self.workers)


def count_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _WorkerProcess:
    def __init__(self, threads: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        # Spawned, never forked: a fork copies torch's locks without the threads that would open them.
        self.process = SpawnProcess(target=serve_tasks, args=(theirs, threads))
        with _block_interrupts():
            self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        theirs.close()  # else we would not see the end of the pipe when the worker dies
        self.ready = False
        self.job: Job | None = None
        self.deadline = math.inf  # on the clock of time.monotonic
        self.knows: deque[str] = deque(maxlen=KEPT)  # the same works that its Inbox keeps

    def send_job(self, job: Job) -> None:
        self.job, number = job, job.parcel.number
        self.deadline = math.inf if job.timeout is None else time.monotonic() + job.timeout
        content = None if number in self.knows else job.parcel.content
        if content is not None:
            self.knows.append(number)
        self.connection.send_bytes(pickle.dumps((number, content, job.content)))

    def receive(self) -> bytes:
        # Its last words first: it may have answered and died then.
        if not self.connection.poll():
            raise EOFError
        return self.connection.recv_bytes()


class _ProcessSession(Session):
    def __init__(self, workers: int) -> None:
        self._most, self._threads = workers, max(1, count_cores() // workers)
        self._outbox, self._jobs = WorkPacker(), JobQueue()
        self._workers: list[_WorkerProcess] = []
        self._died_starting = 0
        self._open = True
        self._guard = ProcessGuard()
        atexit.register(self._close)  # of a session that nobody closed: Python would wait for the workers for ever

    @property
    def at_once(self) -> int:
        return 2 * self._most  # the next task is there when a worker is free

    def __exit__(self, *error: object) -> None:
        self._close()

    def submit(
        self, task: Task, work: Callable[[Any], Any], *, soon: bool = False, timeout: float | None = None
    ) -> None:
        if not self._open:
            raise make_closed_session_error(task.key)
        try:
            job = Job(task, self._outbox.pack(work), pickle.dumps(task), timeout)
        except Exception as error:
            self._jobs.done.append((task, make_send_failure(error)))
            return
        self._jobs.add(job, soon)
        self._assign_jobs()

    def iter_results(self) -> Iterator[tuple[Any, Any]]:
        while True:
            self._assign_jobs()
            if self._jobs.done:
                yield self._jobs.done.popleft()
            elif self._num_running or self._jobs.count_ready(0):
                self._wait_for_workers()
            else:
                return

    @property
    def _num_running(self) -> int:
        return sum(worker.job is not None for worker in self._workers)

    def _assign_jobs(self) -> None:
        for worker in [each for each in self._workers if each.ready and not each.job]:
            if self._jobs.count_ready(self._num_running):
                try:
                    worker.send_job(self._jobs.pop_next())
                except OSError:
                    self._handle_dead_worker(worker)
        starting = sum(not worker.ready for worker in self._workers)
        for _ in range(min(self._jobs.count_ready(self._num_running) - starting, self._most - len(self._workers))):
            self._start_worker()

    def _start_worker(self) -> None:
        try:
            worker = _WorkerProcess(self._threads)
        except OSError as error:
            raise make_loss_error(
                "worker processes", f"a new one cannot be started ({format_error_line(error)})"
            ) from error
        self._guard.watch(worker.pid)
        self._workers.append(worker)

    def _wait_for_workers(self) -> None:
        """Wait until a worker says something or dies, or its time is over."""
        heard_from = [each for worker in self._workers for each in (worker.connection, worker.process.sentinel)]
        patience = min(worker.deadline for worker in self._workers) - time.monotonic()
        said = set(wait(heard_from, min(max(0.0, patience), LONGEST_WAIT)))
        for worker in [each for each in self._workers if said & {each.connection, each.process.sentinel}]:
            try:
                message = worker.receive()
            except (EOFError, OSError):
                self._handle_dead_worker(worker)
                continue
            if worker.job:
                self._jobs.finish(worker.job, unpack_result(message))
                worker.job, worker.deadline = None, math.inf
            worker.ready, self._died_starting = True, 0
        for worker in [each for each in self._workers if each.deadline <= time.monotonic()]:
            assert worker.job is not None
            assert worker.job.timeout is not None
            self._jobs.finish(worker.job, make_timeout_failure(worker.job.timeout))
            self._stop_worker(worker)

    def _stop_worker(self, worker: _WorkerProcess) -> None:
        self._workers.remove(worker)
        self._guard.forget(worker.pid)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()

    def _handle_dead_worker(self, worker: _WorkerProcess) -> None:
        self._stop_worker(worker)
        how = _format_exit(worker.process.exitcode)
        if worker.job:
            self._jobs.record_death(worker.job, how)
        elif not worker.ready:
            self._died_starting += 1
            if self._died_starting >= STARTS:
                raise ExecutorError(
                    f"Expected workers that start, but got {STARTS} worker processes in a row that {how} while they "
                    'started. Try putting what the script does under `if __name__ == "__main__":`, see what they '
                    "print, or using executor='here'."
                )

    def _close(self) -> None:
        self._open = False
        atexit.unregister(self._close)
        for worker in self._workers:
            if worker.job or not worker.ready:
                worker.process.kill()
            worker.connection.close()  # which tells those without a task to go
        for worker in list(self._workers):
            worker.process.join(5.0)
            self._stop_worker(worker)
        self._jobs.clear()
        self._guard.close()


def _format_exit(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was ended by {name}" + (" (often: the machine ran out of memory)" if name == "SIGKILL" else "")


@contextmanager
def _block_interrupts() -> Iterator[None]:
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
