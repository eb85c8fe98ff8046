"""The peak of the memory that a part of a program takes, on a GPU or of the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from saltflat.gradients.base import HeapTrimmer

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryWatch:
    """Finds out how much more memory was held at some time than at the start.

    On a GPU, these are the bytes of torch's allocator; on a CPU, the resident memory of the process, where Linux
    reports it. The peak that these systems keep is set back.

    Attributes:
        peak: the largest number of bytes beyond those at the start; None where the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak: int | None = None
        self._device = device

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch until the end of the context."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            start = torch.cuda.memory_allocated(self._device)
            yield
            self.peak = torch.cuda.max_memory_allocated(self._device) - start
            return
        # What the heap holds without need would be used before new memory is.
        HeapTrimmer(0).trim()
        before = _start_process_peak() if self._device.type == "cpu" else None
        yield
        if before is not None:
            self.peak = _read_status("VmHWM") - before
        HeapTrimmer(0).trim()


def _start_process_peak() -> int | None:
    """Set back the peak of the process, and return its resident bytes; None if the system does not allow it."""
    try:
        RESET.write_text("5")
        return _read_status("VmRSS")
    except OSError:
        return None


def _read_status(key: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
