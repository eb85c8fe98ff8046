"""Where the tasks of a study are run: in this process, in processes of this machine, or on a Ray cluster.

All three give the same results::

    executor = make_executor("processes", workers=4)
    for task, result in executor.run(tasks, work):
        ...  # as they finish; an error in work is a Failure(error, traceback)

Where results make new tasks (train, then measure), see :class:`Session`.
"""

from saltflat.studies.executors.executor import Executor, Session, Task
from saltflat.studies.executors.failure import ExecutorError, Failure
from saltflat.studies.executors.here import LocalExecutor
from saltflat.studies.executors.processes import ProcessExecutor
from saltflat.studies.executors.ray import RayExecutor
from saltflat.studies.executors.registry import EXECUTORS, make_executor

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
