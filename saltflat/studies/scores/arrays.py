"""Numbers as the scores take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saltflat.errors import StudyError

Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"
# How often each run is in each resample, (runs, resamples): whole numbers, which float32 holds exactly below 2^24.
Counts: TypeAlias = "NDArray[np.float32]"

# Runs times resamples that are worked on at once: 8 MB of float64.
BLOCK = 1_000_000


def check_paired_values(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Two lists of finite numbers, one of each per run."""
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise StudyError(
            f"Got values of shape {first.shape} and {second.shape}. Want two lists with a number per run. "
            "Do: give both for the same runs."
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise StudyError("Got a value that is not finite. Want finite numbers. Do: leave those runs out.")
    return first, second


def make_unit_counts(count: int) -> Counts:
    """Every run drawn once: the resample that gives the score itself."""
    return np.ones((count, 1), dtype=np.float32)


def iter_blocks(times: Counts) -> Iterator[Counts]:
    """Some resamples at a time, so that the numbers worked on stay in the cache of a processor."""
    step = max(8, BLOCK // max(1, len(times)))
    for start in range(0, times.shape[1], step):
        yield times[:, start : start + step]


def divide_or_nan(part: Any, whole: Any) -> Floats:
    """The quotient; nan where there is nothing to divide by."""
    whole = np.asarray(whole, dtype=np.float64)
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)
