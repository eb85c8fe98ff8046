"""Random states: remembered, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch


def snapshot_rng() -> Callable[[], None]:
    """A function that puts Python's, NumPy's and torch's random states back to what they are now.

    Example:
        >>> restore = snapshot_rng()
        >>> first = torch.rand(3)
        >>> restore()
        >>> bool((torch.rand(3) == first).all())
        True
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore_rng() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore_rng
