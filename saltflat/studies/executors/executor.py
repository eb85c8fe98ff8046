"""What every executor can do, and what it hands back where a task failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from saltflat.errors import SaltflatError, format_error_line

KeyT = TypeVar("KeyT")
T = TypeVar("T")
TRIES = 3  # of a task whose worker dies, or whose machine is lost


class ExecutorError(SaltflatError, RuntimeError):
    """Nothing can be run, or run on: workers do not start, a cluster does not answer or is lost, a session is over."""


@dataclass(frozen=True)
class Failure:
    """A task that came to nothing.

    Attributes:
        error: in one line, such as ``"TypeError: 'int' object is not callable"``.
        traceback: as Python prints it; empty where no Python code failed, as when a worker process was killed.
    """

    error: str
    traceback: str = ""


def make_failure(error: BaseException) -> Failure:
    """An error as a failure. Its traceback starts where our own code called.

    Example:
        >>> make_failure(ValueError("lr is negative")).error
        'ValueError: lr is negative'
    """
    try:
        said = format_error_line(error)
    except Exception:  # an error whose own text cannot be made is still to be told
        said = f"{type(error).__name__}: no message"
    # The first frame is that of our caller. Without it the text is the same under every executor.
    beyond = error.__traceback__.tb_next if error.__traceback__ else None
    return Failure(said, "".join(traceback.format_exception(type(error), error, beyond)))


def attempt_task(
    work: Callable[[KeyT], T], task: KeyT, catch: tuple[type[BaseException], ...] = (Exception,)
) -> T | Failure:
    """What the work makes of the task, or the failure it ends in.

    Example:
        >>> attempt_task(len, "four"), attempt_task(len, 4).error
        (4, "TypeError: object of type 'int' has no len()")
    """
    try:
        return work(task)
    except catch as error:
        return make_failure(error)


def make_death_failure(how: str) -> Failure:
    """Return the failure of a task whose workers all died, the last one while nothing else ran."""
    return Failure(
        f"WorkerDied: Expected a worker process that lives until the task is done, but got one that {how}, {TRIES} "
        "times with this task, the last time with no other task beside it. Try smaller groups (together) or a machine "
        "with more memory, or executor='here' to see what ends it."
    )


def make_timeout_failure(seconds: float) -> Failure:
    """Return the failure of a task that was stopped at its time limit."""
    return Failure(
        f"TimedOut: Expected a result within {seconds:g} s, but got none, and the work was stopped. "
        "Try a larger timeout, with retry_failed (--timeout, --retry-failed)."
    )


def make_loss_error(what: str, why: str) -> ExecutorError:
    """Return the error that ends a session in which no task is to blame."""
    return ExecutorError(
        f"Expected {what} until all tasks are done, but lost it: {why}. No task is marked as failed for it."
    )


def make_closed_session_error(key: str) -> ExecutorError:
    """Of a task that comes too late."""
    return ExecutorError(
        f"Expected it before, but got the task {key!r} after the session was closed. Try submitting inside of `with "
        "executor.open_session() as session:`."
    )


class Task(Protocol):
    """One piece of work to be done, here or elsewhere; it can be pickled.

    Attributes:
        key: its name.
        resources: what it needs, ``{"cpus": 1, "gpus": 0}`` if it says nothing.
    """

    @property
    def key(self) -> str: ...
    @property
    def resources(self) -> Mapping[str, float]: ...


K = TypeVar("K", bound=Task)


class Session(AbstractContextManager["Session"], Protocol):
    """Tasks on their way. Hand in what is known, and further tasks as results come: nothing waits for anything else.

    >>> from saltflat.studies.executors import LocalExecutor
    >>> from types import SimpleNamespace
    >>> def train(task): return task.key.upper()
    >>> def measure(task): return len(task.key)
    >>> with LocalExecutor().open_session() as session:
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
        """So many tasks handed in keep it busy."""

    def submit(
        self, task: Task, work: Callable[[Any], Any], *, soon: bool = False, timeout: float | None = None
    ) -> None:
        """Hand in a task. Hand in one and the same object as ``work`` each time: then it travels once per worker.

        Args:
            task: what to do.
            work: what does it, a function at the top of a module (or a ``functools.partial`` of one).
            soon: before all that wait already, as when a network just trained is to be measured.
            timeout: seconds that the work may take from its beginning, each time it is tried; then it is stopped, and
                the result is a Failure. None for no limit. ``here`` cannot stop its work, and refuses a limit.
        """

    def iter_results(self) -> Iterator[tuple[Any, Any]]:
        """Each task with its result or Failure, as they finish, until nothing that was handed in is left.

        Tasks may be handed in between two results. Called again, it goes on with what was handed in since. What no
        task is to blame for, such as a cluster that is lost, is an ExecutorError and ends the session.
        """


class Executor(Protocol):
    """Where the tasks of a study are run: in this process, in others, on a cluster."""

    name: str

    def open_session(self) -> Session:
        """A session, to be used as a context: at its end, by an error or Ctrl-C too, whatever still runs is stopped."""

    def run(
        self, tasks: Iterable[K], work: Callable[[K], T], *, timeout: float | None = None
    ) -> Iterator[tuple[K, T | Failure]]:
        """Each task with its result, as they finish; an error in ``work`` is a Failure and stops nothing.

        Tasks are taken as they are needed, at most ``session.at_once`` of them ahead of the results; ``here`` takes the
        next one only when its result is asked for. Where results make new tasks, use ``open_session``.
        """
        with self.open_session() as session:
            coming = iter(tasks)
            for task in islice(coming, session.at_once):
                session.submit(task, work, timeout=timeout)
            for finished in session.iter_results():
                yield finished
                for task in islice(coming, 1):
                    session.submit(task, work, timeout=timeout)
