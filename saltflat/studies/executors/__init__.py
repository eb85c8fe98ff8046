"""Where the tasks of a study are run: in this process, in processes of this machine, or on a Ray cluster.

All three give the same results::

    executor = make_executor("processes", workers=4)
    for task, result in executor.run(tasks, work):
        ...  # as they finish; an error in work is a Failure(error, traceback)

Where results make new tasks (train, then measure), see :class:`Session`.
"""

from __future__ import annotations

import inspect
from typing import Any

from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.studies.executors.executor import Executor, ExecutorError, Failure, Session, Task
from saltflat.studies.executors.processes import ProcessExecutor
from saltflat.studies.executors.ray import RayExecutor
from saltflat.studies.executors.serial import LocalExecutor

__all__ = [
    "EXECUTORS",
    "Executor",
    "ExecutorError",
    "Failure",
    "LocalExecutor",
    "ProcessExecutor",
    "RayExecutor",
    "Session",
    "Task",
    "make_executor",
]


EXECUTORS: dict[str, type[Executor]] = {each.name: each for each in (LocalExecutor, ProcessExecutor, RayExecutor)}


def make_executor(name: str, *, workers: int | None = None, address: str | None = None, **options: Any) -> Executor:
    """The executor of this name: ``here``, ``processes`` or ``ray``.

    Args:
        name: of the executor.
        workers: how many processes (``processes``), or cores of a cluster that is started (``ray``).
        address: of a running Ray cluster.
        options: what else the executor takes.

    Example:
        >>> make_executor("processes", workers=2).name
        'processes'
        >>> make_executor("proceses")
        Traceback (most recent call last):
        saltflat.errors.UnknownNameError: Got the executor 'proceses', which does not exist. Want one of: here,
        processes, ray. Do: use 'processes'.
    """
    if name not in EXECUTORS:
        raise make_unknown_name_error("executor", name, EXECUTORS)
    executor = EXECUTORS[name]
    given = {
        key: value for key, value in {"workers": workers, "address": address, **options}.items() if value is not None
    }
    # An executor without a constructor of its own shows the parameters of none in particular.
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [name for name, each in inspect.signature(executor).parameters.items() if each.kind in named]
    for key in given:
        if key not in taken:
            raise OptionError(
                f"Got {key}={given[key]!r} for the executor {name!r}. Want {', '.join(taken) or 'no options'}. "
                "Do: leave it out, or choose another executor."
            )
    return executor(**given)
