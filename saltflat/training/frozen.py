"""Buffers that an extra pass must leave alone: BatchNorm's running statistics before all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def frozen_buffers(model: nn.Module) -> Iterator[None]:
    """Passes inside leave every buffer as it was; layers in training mode normalise as they do in training.

    Normalisation layers in training mode do not see their running statistics, so there is nothing to write to: torch
    uses the batch's own, as it does anyway. Whatever else is in training mode (spectral norm, layers of the user's own)
    may write, and gets its buffers back afterwards. DistributedDataParallel does not hand out the first process's.
    """
    with ExitStack() as stack:
        others: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.callback(setattr, module, "broadcast_buffers", module.broadcast_buffers)
                module.broadcast_buffers = False
            if not (module.training and module._buffers):
                continue
            stack.callback(_put_in, module, dict(module._buffers))
            if isinstance(module, _NormBase):
                stack.callback(setattr, module, "track_running_stats", module.track_running_stats)
                module.track_running_stats = False
                module._buffers.update(dict.fromkeys(STATISTICS))
            else:
                others += [each for each in module._buffers.values() if each is not None]
        stack.callback(_put_back, others, [each.detach().clone() for each in others])
        yield


def _put_in(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    for key, buffer in buffers.items():
        if module._buffers.get(key) is not buffer:
            module._buffers[key] = buffer


def _put_back(buffers: list[Tensor], kept: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)


def normalises_by_batch(model: nn.Module) -> bool:
    """Whether an example's outputs depend on the others of its batch, through layers that torch knows."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return any(isinstance(each, batch_norm) and each.training for each in model.modules())
