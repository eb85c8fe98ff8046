"""The session shared by executors whose tasks run in other processes: a queue of packed tasks, and retries."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from saltflat.studies.executors.executor import (
    MAX_TRIES,
    Failure,
    Session,
    Task,
    make_closed_session_error,
    make_death_failure,
)
from saltflat.studies.executors.pickling import Dumps, PackedWork, WorkPacker, make_send_failure

T = TypeVar("T")


@dataclass(eq=False)
class Job:
    """A packed task.

    Attributes:
        task: the task as submitted.
        work: the packed work to apply to it.
        content: the pickled task.
        timeout: seconds that the work may take; None for no limit.
        deaths: how many workers died while running it.
        losses: how often a cluster lost a machine or an object while running it.
    """

    task: Task
    work: PackedWork
    content: bytes
    timeout: float | None = None
    deaths: int = 0
    losses: int = 0


class JobQueue:
    """Hold waiting jobs in the order they will run, and results not yet returned.

    The death of a worker says little about its task: the system may have killed it for memory that other tasks used.
    A task whose worker died is therefore retried, the last time after all others and with no other task running. If
    that worker dies too, the task is at fault.
    """

    def __init__(self) -> None:
        self.done: deque[tuple[Task, Any]] = deque()
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._alone = False

    def add(self, job: Job, soon: bool) -> None:
        """Append a job, or prepend it if it should run soon."""
        (self._waiting.appendleft if soon else self._waiting.append)(job)

    def clear(self) -> None:
        """Drop all waiting jobs."""
        self._waiting.clear()
        self._suspects.clear()

    def count_ready(self, running: int) -> int:
        """Return how many jobs may start now, while ``running`` others run."""
        if self._alone and running:
            return 0
        # A result that was not returned yet may lead to further tasks, which run before suspects.
        return len(self._waiting) or int(bool(self._suspects) and not running and not self.done)

    def pop_next(self) -> Job:
        """Remove and return the first ready job."""
        self._alone = not self._waiting
        return self._waiting.popleft() if self._waiting else self._suspects.popleft()

    def finish(self, job: Job, result: T | Failure) -> None:
        """Record the result of a job."""
        self.done.append((job.task, result))

    def record_death(self, job: Job, reason: str) -> None:
        """Retry or fail a job whose worker died; the reason completes "a worker process that ..."."""
        job.deaths += 1
        if job.deaths >= MAX_TRIES:
            self.finish(job, make_death_failure(reason))
        else:
            self.retry(job)

    def retry(self, job: Job) -> None:
        """Queue a job again: first, or after all others if this is its last try."""
        if job.deaths == MAX_TRIES - 1:
            self._suspects.append(job)
        else:
            self._waiting.appendleft(job)


class JobSession(Session):
    """Pack submitted tasks, pass them to workers and return their results; subclasses provide the workers."""

    def __init__(self, dumps: Dumps = pickle.dumps) -> None:
        self._dumps, self._packer, self._jobs = dumps, WorkPacker(dumps), JobQueue()
        self._open = True

    def __exit__(self, *error: object) -> None:
        self._close()

    def submit(
        self, task: Task, work: Callable[[Any], Any], *, soon: bool = False, timeout: float | None = None
    ) -> None:
        """Queue a task and start it if a worker is free; see :meth:`Session.submit`."""
        if not self._open:
            raise make_closed_session_error(task.key)
        try:
            job = Job(task, self._packer.pack(work), self._dumps(task), timeout)
        except Exception as error:
            self._jobs.done.append((task, make_send_failure(error)))
            return
        self._jobs.add(job, soon)
        self._assign_jobs()

    def iter_results(self) -> Iterator[tuple[Any, Any]]:
        """Yield each task with its result or Failure; see :meth:`Session.iter_results`."""
        while True:
            self._assign_jobs()
            if self._jobs.done:
                yield self._jobs.done.popleft()
            elif self._num_running or self._jobs.count_ready(0):
                self._wait()
            else:
                return

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._jobs.clear()
            self._stop_all()

    @property
    @abstractmethod
    def _num_running(self) -> int:
        """Return how many jobs the workers have."""

    @abstractmethod
    def _assign_jobs(self) -> None:
        """Pass ready jobs to free workers."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for news from the workers, and record it."""

    @abstractmethod
    def _stop_all(self) -> None:
        """Stop all workers, also those that still run a job."""
