"""Run tasks in this process, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from saltflat.errors import OptionError
from saltflat.studies.executors.executor import Executor, Session, Task, attempt_task, make_closed_session_error


class LocalExecutor(Executor):
    """In this process, in order, each task only when its result is asked for. Ctrl-C and ``sys.exit`` end all."""

    name = "here"

    def open_session(self) -> Session:
        return _LocalSession()


class _LocalSession(Session):
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
    """Return the error for a limit that could not be kept: nothing can stop a call that this process itself makes."""
    return OptionError(
        f"Expected an executor that can stop a task, but got timeout={timeout!r} with executor='here', which works in "
        "this process. Try executor='processes' (--executor processes), with workers=1 for one task at a time."
    )
