"""Numbers as the scores take them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saltflat.errors import StudyError

Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"


def paired(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
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


def once(count: int) -> Floats:
    """Every run drawn once: the draws of the plain score."""
    return np.ones((1, count))


def signs(x: Floats) -> Floats:
    """``[a, b]`` is 1 where the first is larger, -1 where the second is, 0 where they are equal."""
    return np.sign(x[:, None] - x[None, :])


def ratio(part: Any, whole: Any) -> Floats:
    """The quotient; nan where there is nothing to divide by."""
    whole = np.asarray(whole, dtype=np.float64)
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)
