"""What every executor can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol, TypeVar

from saltflat.studies.executors.failure import Failure


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
T = TypeVar("T")


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
