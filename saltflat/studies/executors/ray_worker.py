"""The inside of a Ray worker."""

from __future__ import annotations

from functools import cache

import torch

from saltflat.studies.executors.parcels import Inbox


def answered(threads: int, number: str, work: bytes, task: bytes) -> bytes:
    """The packed result of a task, with as many threads as the cores it asked for."""
    torch.set_num_threads(threads)
    return _inbox().answer(number, work, task)


@cache
def _inbox() -> Inbox:
    """Of this process, to which Ray gives many tasks."""
    from ray import cloudpickle

    return Inbox(cloudpickle.dumps)
