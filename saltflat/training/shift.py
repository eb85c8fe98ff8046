"""Gradients at shifted weights: the one mechanism behind everything here that looks for flat minima."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from saltflat.training.frozen import frozen_buffers


@contextmanager
def shifted(model: nn.Module, parameters: list[Tensor], steps: list[Tensor]) -> Iterator[None]:
    """Inside, parameters have moved by ``steps``; afterwards, or after an error, they are what they were, bit for bit.

    They are moved in place, so everything that holds on to them (optimizers, compiled graphs, DistributedDataParallel)
    sees them move, and put back from a copy, because adding and subtracting again would leave rounding behind. Buffers
    come back, too: see :func:`~saltflat.training.frozen.frozen_buffers`.

    Args:
        model: whose extra passes run inside.
        parameters: some of its parameters, each once.
        steps: how far to move each of them.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> with shifted(layer, [layer.weight], [torch.ones(1, 1)]):
        ...     layer.weight.item()
        3.0
        >>> layer.weight.item()
        2.0
    """
    kept = [each.detach().clone() for each in parameters]
    with frozen_buffers(model):
        try:
            if kept:
                with torch.no_grad():
                    torch._foreach_add_(parameters, steps)
            # Autocast keeps its low-precision copies of the weights: without this the old ones would be used.
            torch.clear_autocast_cache()
            yield
        finally:
            if kept:
                with torch.no_grad():
                    torch._foreach_copy_(parameters, kept)
            torch.clear_autocast_cache()
