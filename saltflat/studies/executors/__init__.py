"""Run the tasks of a study: in this process, in worker processes of this machine, or on a Ray cluster.

All three return the same results::

    executor = make_executor("processes", workers=4)
    for task, result in executor.run(tasks, work):
        ...  # as they finish; an error in work becomes a Failure(error, traceback)

If results lead to new tasks (train, then measure), open a :class:`Session`.
"""

from __future__ import annotations

import inspect
from typing import Any

from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.studies.executors.executor import Executor, ExecutorError, Failure, Session, Task
from saltflat.studies.executors.processes import ProcessExecutor
from saltflat.studies.executors.ray import RayExecutor
from saltflat.studies.executors.serial import SerialExecutor

__all__ = [
    "EXECUTORS",
    "Executor",
    "ExecutorError",
    "Failure",
    "ProcessExecutor",
    "RayExecutor",
    "SerialExecutor",
    "Session",
    "Task",
    "make_executor",
]


EXECUTORS: dict[str, type[Executor]] = {each.name: each for each in (SerialExecutor, ProcessExecutor, RayExecutor)}


def make_executor(name: str, *, workers: int | None = None, address: str | None = None, **options: Any) -> Executor:
    """Return the executor with this name: ``serial``, ``processes`` or ``ray``.

    Args:
        name: the executor's name.
        workers: the number of processes (``processes``), or the cores of a cluster that is started (``ray``).
        address: the address of a running Ray cluster.
        options: further arguments of the executor.

    Example:
        >>> make_executor("processes", workers=2).name
        'processes'
        >>> make_executor("proceses")
        Traceback (most recent call last):
        saltflat.errors.UnknownNameError: ...'proceses'...'processes'...
    """
    if name not in EXECUTORS:
        raise make_unknown_name_error("executor", name, EXECUTORS)
    executor = EXECUTORS[name]
    given = {
        key: value for key, value in {"workers": workers, "address": address, **options}.items() if value is not None
    }
    # A class without a constructor has the signature (*args, **kwargs), which accepts no option by name.
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [key for key, each in inspect.signature(executor).parameters.items() if each.kind in named]
    for key in given:
        if key not in accepted:
            raise OptionError(
                f"Expected {', '.join(accepted) or 'no options'} for the executor {name!r}, but got "
                f"{key}={given[key]!r}. Try leaving it out, or choose another executor."
            )
    return executor(**given)
