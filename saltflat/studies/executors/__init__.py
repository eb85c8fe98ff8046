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
    "The executor of this name: ``here``, ``processes`` or ``ray``.\n\n    Args:\n        name: of the executor.\n"
    "workers: how many processes (``processes``), or cores of a cluster that is started (``ray``).\n        address: "
    "of a running Ray cluster.\n        options: what else the executor takes.\n\n    Example:\n        >>> "
    'make_executor("processes", workers=2).name\n        \'processes\'\n        >>> make_executor("proceses")\n        '
    "Traceback (most recent call last):\n        saltflat.errors.UnknownNameError: Expected one of, but got the "
    "executor 'proceses', which does not exist. Here,\n        processes, ray. Try using 'processes'."
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
                f"Expected {', '.join(taken) or 'no options'}, but got {key}={given[key]!r} for the executor "
                f"{name!r}. Try leaving it out, or choosing another executor."
            )
    return executor(**given)
