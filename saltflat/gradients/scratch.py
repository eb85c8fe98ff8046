"""Working arrays that are reused, and memory handed back to the system.

The large intermediate arrays of a sweep have the same few sizes in every chunk. Allocated anew each time they come as
untouched pages from the operating system, and touching those takes longer than the arithmetic on them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from mmap import PAGESIZE

import torch
from torch import Tensor

_ARRAYS: ContextVar[dict[tuple[str, torch.dtype, torch.device], Tensor] | None] = ContextVar("arrays", default=None)


@contextmanager
def use_scratch() -> Iterator[None]:
    """Keep working arrays until the end of the block."""
    token = _ARRAYS.set({})
    try:
        yield
    finally:
        _ARRAYS.reset(token)


class HeapTrimmer:
    """Keeps the heap from growing by gaps, where the C library and the system allow it (glibc on Linux).

    Arrays of ever other sizes do not fit into the gaps that others left, so the heap grows though little of it is in
    use. Handing gaps back to the system costs as much as touching new pages, and is done only when they add up.

    Args:
        room: bytes by which the process may grow before that.
    """

    def __init__(self, room: int) -> None:
        self.room, self.low = room, _read_resident_bytes()

    def release(self) -> None:
        """Hand gaps back if the process has grown too much since this was last done."""
        if self.low and _read_resident_bytes() - self.low > self.room:
            self.trim()

    def trim(self) -> None:
        """Hand gaps back."""
        if self.low:
            _find_malloc_trim()(0)
            self.low = _read_resident_bytes()


@cache
def _find_malloc_trim() -> Callable[[int], int]:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return lambda padding: 0
    return found


def _read_resident_bytes() -> int:
    """Bytes of the process in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGESIZE
    except OSError:
        return 0


def get_scratch_array(use: str, shape: Sequence[int], like: Tensor) -> Tensor:
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
