"""Run tasks in worker processes of this machine."""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

from saltflat.errors import format_error_line
from saltflat.studies.executors.executor import (
    Executor,
    ExecutorError,
    Session,
    check_workers,
    make_loss_error,
    make_timeout_failure,
)
from saltflat.studies.executors.guard import ProcessGuard
from saltflat.studies.executors.pickling import SentWorks, serve_tasks, unpack_result
from saltflat.studies.executors.session import Job, JobSession

MAX_STARTS = 3  # workers in a row that may die before they are ready
LONGEST_WAIT = 3600.0  # seconds; the system refuses to wait for weeks in one call


class ProcessExecutor(Executor):
    """Run tasks in worker processes of this machine, at most ``workers`` at a time (default: the number of cores).

    Workers share the cores: each one gets an equal number of threads. If a worker dies (killed, out of memory), only
    its task is affected; it is tried three times in all, the last time while no other task runs. When this process
    ends for any reason, its workers end within a second. The resources of tasks are ignored.

    A script that uses it must put its code under ``if __name__ == "__main__":``, since workers import the script.
    """

    name = "processes"

    def __init__(self, workers: int | None = None) -> None:
        check_workers(workers, default="one per core")
        self.workers = workers or count_cores()

    def open_session(self) -> Session:
        """Return a session; its workers start with the first tasks."""
        return _ProcessSession(self.workers)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _WorkerProcess:
    def __init__(self, threads: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        # Spawned, never forked: a fork copies torch's locks without the threads that would release them.
        self.process = SpawnProcess(target=serve_tasks, args=(theirs, threads))
        with _block_interrupts():
            self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        theirs.close()  # otherwise we would not see the end of the pipe when the worker dies
        self.ready = False
        self.job: Job | None = None
        self.deadline = math.inf  # on the clock of time.monotonic
        self.works = SentWorks()

    def send_job(self, job: Job) -> None:
        self.job = job
        self.deadline = math.inf if job.timeout is None else time.monotonic() + job.timeout
        content = self.works.get_unsent_content(job.work)
        self.connection.send_bytes(pickle.dumps((job.work.work_id, content, job.content)))

    def receive(self) -> bytes:
        # Read its last answer first: it may have answered before it died.
        if not self.connection.poll():
            raise EOFError
        return self.connection.recv_bytes()


class _ProcessSession(JobSession):
    def __init__(self, workers: int) -> None:
        super().__init__()
        self._max_workers, self._threads = workers, max(1, count_cores() // workers)
        self._workers: list[_WorkerProcess] = []
        self._died_starting = 0
        self._guard = ProcessGuard()
        atexit.register(self._close)  # if nobody closes the session, Python would wait for the workers forever

    @property
    def at_once(self) -> int:
        return 2 * self._max_workers  # the next task is ready when a worker becomes free

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
        for _ in range(
            min(self._jobs.count_ready(self._num_running) - starting, self._max_workers - len(self._workers))
        ):
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

    def _wait(self) -> None:
        """Wait until a worker answers, dies or reaches its time limit."""
        watched = [each for worker in self._workers for each in (worker.connection, worker.process.sentinel)]
        remaining = min(worker.deadline for worker in self._workers) - time.monotonic()
        changed = set(wait(watched, min(max(0.0, remaining), LONGEST_WAIT)))
        for worker in [each for each in self._workers if changed & {each.connection, each.process.sentinel}]:
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
        reason = _format_exit(worker.process.exitcode)
        if worker.job:
            self._jobs.record_death(worker.job, reason)
        elif not worker.ready:
            self._died_starting += 1
            if self._died_starting >= MAX_STARTS:
                raise ExecutorError(
                    f"Expected workers that start, but got {MAX_STARTS} worker processes in a row that {reason} while "
                    'they started. Try putting what the script does under `if __name__ == "__main__":`, or use '
                    "executor='serial'."
                )

    def _stop_all(self) -> None:
        atexit.unregister(self._close)
        for worker in self._workers:
            if worker.job or not worker.ready:
                worker.process.kill()
            worker.connection.close()  # which ends workers without a task
        for worker in list(self._workers):
            worker.process.join(5.0)
            self._stop_worker(worker)
        self._guard.close()


def _format_exit(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was ended by {name}" + (" (often: the machine ran out of memory)" if name == "SIGKILL" else "")


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT, so that a worker started inside inherits the block until it ignores the signal itself."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise it starts with the first worker, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
