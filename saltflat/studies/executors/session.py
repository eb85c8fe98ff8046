"""The inside of a Ray worker."""

from __future__ import annotations

import os
import threading
from functools import cache

import torch

from saltflat.studies.executors.pickling import TaskRunner


def run_remote_task(threads: int, number: str, work: bytes, task: bytes, timeout: float | None, mark: str) -> bytes:
    """The packed result of a task, with as many threads as the cores it asked for.

    Only this process knows when the work began. At the time limit it leaves a mark for the driver and ends itself.
    """
    torch.set_num_threads(threads)
    if timeout is None:
        return _get_task_runner().run_task(number, work, task)
    clock = threading.Timer(min(timeout, threading.TIMEOUT_MAX), _end_process, (mark,))
    clock.daemon = True
    clock.start()
    try:
        return _get_task_runner().run_task(number, work, task)
    finally:
        clock.cancel()


def _end_process(mark: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    try:
        _internal_kv_put(mark, b"")
    finally:
        os._exit(1)


@cache
def _get_task_runner() -> TaskRunner:
    """Of this process, to which Ray gives many tasks."""
    from ray import cloudpickle

    return TaskRunner(cloudpickle.dumps)
