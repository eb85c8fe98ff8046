"""What an executor hands back where a result should have been."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from saltflat.errors import SaltflatError, format_error_line

K = TypeVar("K")
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


def attempt_task(work: Callable[[K], T], task: K, catch: tuple[type[BaseException], ...] = (Exception,)) -> T | Failure:
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
        f"Got the task {key!r} after the session was closed. Want it before. "
        "Do: submit inside of `with executor.open_session() as session:`."
    )
