"""The interface of executors and sessions, and the failures and errors they report."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from saltflat.errors import OptionError, SaltflatError, format_error_line

KeyT = TypeVar("KeyT")
T = TypeVar("T")
MAX_TRIES = 3  # of a task whose worker dies, or whose machine is lost


class ExecutorError(SaltflatError, RuntimeError):
    """No task can run: workers do not start, a cluster is unreachable or lost, or the session is closed."""


@dataclass(frozen=True)
class Failure:
    """The result of a task that failed.

    Attributes:
        error: one line, such as ``"TypeError: 'int' object is not callable"``.
        traceback: as Python prints it; empty if no Python code failed, for example if a worker process was killed.
    """

    error: str
    traceback: str = ""


def make_failure(error: BaseException) -> Failure:
    """Convert an error to a failure whose traceback starts in the called code.

    Example:
        >>> make_failure(ValueError("lr is negative")).error
        'ValueError: lr is negative'
    """
    try:
        line = format_error_line(error)
    except Exception:  # the error's own __str__ may fail
        line = f"{type(error).__name__}: no message"
    # The first frame is that of our caller. Without it the text is the same under every executor.
    start = error.__traceback__.tb_next if error.__traceback__ else None
    return Failure(line, "".join(traceback.format_exception(type(error), error, start)))


def attempt_task(
    work: Callable[[KeyT], T], task: KeyT, catch: tuple[type[BaseException], ...] = (Exception,)
) -> T | Failure:
    """Return ``work(task)``, or a failure if it raises.

    Example:
        >>> attempt_task(len, "four"), attempt_task(len, 4).error
        (4, "TypeError: object of type 'int' has no len()")
    """
    try:
        return work(task)
    except catch as error:
        return make_failure(error)


def make_death_failure(reason: str) -> Failure:
    """Return the failure of a task whose workers all died, the last one while no other task ran."""
    return Failure(
        f"WorkerDied: Expected a worker process that lives until the task is done, but got one that {reason}, "
        f"{MAX_TRIES} times with this task, the last time while no other task ran. Try smaller groups (together), a "
        "machine with more memory, or executor='serial' to see what ends it."
    )


def make_timeout_failure(seconds: float) -> Failure:
    """Return the failure of a task that was stopped at its time limit."""
    return Failure(
        f"TimedOut: Expected a result within {seconds:g} s, but got none, and the work was stopped. "
        "Try a larger timeout, with retry_failed (--timeout, --retry-failed)."
    )


def make_loss_error(resource: str, reason: str) -> ExecutorError:
    """Return the error that ends a session for a reason that is no task's fault."""
    return ExecutorError(
        f"Expected {resource} until all tasks are done, but lost it: {reason}. No task is marked as failed for it."
    )


def make_closed_session_error(key: str) -> ExecutorError:
    """Return the error for a task submitted after the session was closed."""
    return ExecutorError(
        f"Expected an open session, but got the task {key!r} after the session was closed. Try submitting it inside "
        "`with executor.open_session() as session:`."
    )


def check_workers(workers: int | None, default: str) -> None:
    """Check that ``workers`` is a positive whole number or None; ``default`` says what None means."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise OptionError(
            f"Expected a whole number from 1, but got workers={workers!r}. Try leaving it out for {default}."
        )


class Task(Protocol):
    """One piece of work; it can be pickled.

    Attributes:
        key: its name.
        resources: what it needs; entries left out default to ``{"cpus": 1, "gpus": 0}``.
    """

    @property
    def key(self) -> str: ...
    @property
    def resources(self) -> Mapping[str, float]: ...


K = TypeVar("K", bound=Task)


class Session(AbstractContextManager["Session"], Protocol):
    """Run tasks and return their results as they finish; results may lead to new tasks.

    >>> from saltflat.studies.executors import SerialExecutor
    >>> from types import SimpleNamespace
    >>> def train(task): return task.key.upper()
    >>> def measure(task): return len(task.key)
    >>> with SerialExecutor().open_session() as session:
    ...     for key in ("a", "bc"):
    ...         session.submit(SimpleNamespace(key=key, resources={}), train)
    ...     for task, result in session.iter_results():
    ...         print(task.key, result)
    ...         if isinstance(result, str):
    ...             session.submit(SimpleNamespace(key=result, resources={}), measure, soon=True)
    a A
    A 1
    bc BC
    BC 2
    """

    @property
    def at_once(self) -> int:
        """Return the number of submitted tasks that keeps all workers busy."""

    def submit(
        self, task: Task, work: Callable[[Any], Any], *, soon: bool = False, timeout: float | None = None
    ) -> None:
        """Submit a task. Pass the same object as ``work`` each time, so that it is sent only once to each worker.

        Args:
            task: the argument of ``work``.
            work: a function at the top level of a module (or a ``functools.partial`` of one).
            soon: run it before all waiting tasks, for example to measure a network that was just trained.
            timeout: seconds that each try may take, counted from its start; a task that takes longer is stopped, and
                its result is a Failure. None for no limit. ``serial`` cannot stop its work and rejects a limit.
        """

    def iter_results(self) -> Iterator[tuple[Any, Any]]:
        """Yield each task with its result or Failure, as they finish, until no submitted task is left.

        Tasks may be submitted between two results. A second call continues with the tasks submitted since. A problem
        that is no task's fault, such as the loss of a cluster, raises an ExecutorError and ends the session.
        """


class Executor(Protocol):
    """Run the tasks of a study in this process, in other processes, or on a cluster."""

    name: str

    def open_session(self) -> Session:
        """Return a session for a ``with`` block; leaving the block, also by an error or Ctrl-C, stops all tasks."""

    def run(
        self, tasks: Iterable[K], work: Callable[[K], T], *, timeout: float | None = None
    ) -> Iterator[tuple[K, T | Failure]]:
        """Yield each task with its result, as they finish; an error in ``work`` becomes a Failure and stops nothing.

        At most ``session.at_once`` tasks are read ahead of the results; ``serial`` reads a task only when its result
        is requested. If results lead to new tasks, use ``open_session``.
        """
        with self.open_session() as session:
            remaining = iter(tasks)
            for task in islice(remaining, session.at_once):
                session.submit(task, work, timeout=timeout)
            for finished in session.iter_results():
                yield finished
                for task in islice(remaining, 1):
                    session.submit(task, work, timeout=timeout)
