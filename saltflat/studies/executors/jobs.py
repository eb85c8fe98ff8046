"""Tasks on their way to worker processes, and what becomes of those whose workers die."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from saltflat.studies.executors.executor import Task
from saltflat.studies.executors.failure import TRIES, make_death_failure
from saltflat.studies.executors.parcels import PackedWork


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
