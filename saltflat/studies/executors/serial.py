"""Run tasks in this process, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from saltflat.errors import OptionError
from saltflat.studies.executors.executor import Executor, Session, Task, attempt_task, make_closed_session_error


class SerialExecutor(Executor):
    """Run tasks in this process, in order, each one when its result is requested.

    Ctrl-C and ``sys.exit`` in a task end the session.
    """

    name = "serial"

    def open_session(self) -> Session:
        """Return a session that runs its tasks in this process."""
        return _SerialSession()


class _SerialSession(Session):
    at_once = 1

    def __init__(self) -> None:
        self._waiting: deque[tuple[Task, Callable[[Any], Any]]] = deque()
        self._open = True

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._waiting.clear()

    def submit(
        self, task: Task, work: Callable[[Any], Any], *, soon: bool = False, timeout: float | None = None
    ) -> None:
        if not self._open:
            raise make_closed_session_error(task.key)
        if timeout is not None:
            raise make_no_timeout_error(timeout)
        (self._waiting.appendleft if soon else self._waiting.append)((task, work))

    def iter_results(self) -> Iterator[tuple[Any, Any]]:
        while self._waiting:
            task, work = self._waiting.popleft()
            yield task, attempt_task(work, task)


def make_no_timeout_error(timeout: float) -> OptionError:
    """Return the error for a time limit under ``serial``: a process cannot stop a call that it makes itself."""
    return OptionError(
        f"Expected an executor that can stop a task, but got timeout={timeout!r} with executor='serial', which works "
        "in this process. Try executor='processes' (--executor processes), with workers=1 for one task at a time."
    )
