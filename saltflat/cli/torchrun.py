"""Processes that torchrun starts: they share a measurement, and the first of them prints and writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def open_process_group() -> Iterator[ProcessGroup | None]:
    """Yield the group of the processes that torchrun started with this one; None if it did not, or started one."""
    import torch
    from torch import distributed

    from saltflat.engine.processes import is_announced

    started = distributed.is_available() and distributed.is_torchelastic_launched()
    if not started or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    if torch.cuda.is_available():
        # What "cuda" means in this process.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    distributed.init_process_group("gloo")
    in_step = True
    try:
        yield distributed.group.WORLD
    except BaseException as error:
        in_step = is_announced(error)
        raise
    finally:
        if in_step:
            # The last message may be on its way to the others, and would be lost if this process closed connections.
            # Who comes late finds them closed, which does no harm any more.
            with suppress(RuntimeError):
                distributed.barrier()
        distributed.destroy_process_group()


def make_group_arguments(group: ProcessGroup | None) -> dict[str, ProcessGroup]:
    """Return keyword arguments for functions of the library that processes share."""
    return {} if group is None else {"process_group": group}


def is_first(group: ProcessGroup | None) -> bool:
    """Return whether this process prints and writes for its group."""
    from torch import distributed

    return group is None or distributed.get_rank(group) == 0
