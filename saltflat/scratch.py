"""Working arrays that are used over and over.

The large intermediate arrays of a sweep have the same few sizes in every chunk. Allocated anew each time they come as
untouched pages from the operating system, and touching those takes longer than the arithmetic on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_ARRAYS: ContextVar[dict[tuple[str, torch.dtype, torch.device], Tensor] | None] = ContextVar("arrays", default=None)


@contextmanager
def scratch() -> Iterator[None]:
    """Keep working arrays until the end of the block."""
    token = _ARRAYS.set({})
    try:
        yield
    finally:
        _ARRAYS.reset(token)


def array(use: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised array; the next one asked for the same use may be the same memory."""
    arrays = _ARRAYS.get()
    size = torch.Size(shape).numel()
    # CUDA's own allocator keeps its memory.
    if arrays is None or like.device.type != "cpu":
        return like.new_empty(shape)
    key = (use, like.dtype, like.device)
    if key not in arrays or arrays[key].numel() < size:
        arrays[key] = like.new_empty(size)
    return arrays[key][:size].view(shape)
