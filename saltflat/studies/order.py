"""In which order a network sees its examples."""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.studies.draws import make_generator


def draw_order(seed: int, epoch: int, count: int) -> Tensor:
    """Of so many examples in one epoch: a random one, which depends on the seed and the epoch alone.

    Example:
        >>> draw_order(0, 3, 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    return torch.randperm(count, generator=make_generator(seed, "order", epoch))


def count_steps(count: int, batch: int) -> int:
    """In an epoch; the last may hold fewer examples.

    Example:
        >>> count_steps(10, 4)
        3
    """
    return -(-count // batch)
