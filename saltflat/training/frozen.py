"""Buffers that an extra pass must leave alone: BatchNorm's running statistics before all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

# Forward passes that neither read nor write running statistics in training mode, once told not to keep any; in eval
# mode they read them all the same. Those of a subclass may do otherwise.
TAKE_A_WORD = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


@contextmanager
def freeze_buffers(model: nn.Module) -> Iterator[None]:
    """Passes inside leave every buffer as it was; layers normalise as they do in their mode.

    Torch's BatchNorm layers are told not to keep running statistics, so that nothing is written. Whatever else writes
    to its buffers (spectral norm, layers of the user's own) gets them back afterwards. DistributedDataParallel does not
    hand out the first process's.
    """
    with ExitStack() as stack:
        others: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.callback(setattr, module, "broadcast_buffers", module.broadcast_buffers)
                module.broadcast_buffers = False
            if type(module).forward in TAKE_A_WORD:
                stack.callback(setattr, module, "track_running_stats", module.track_running_stats)
                vars(module)["track_running_stats"] = False
            elif module._buffers:
                stack.callback(_restore_buffer_objects, module, dict(module._buffers))
                others += [each for each in module._buffers.values() if each is not None]
        stack.callback(_restore_buffer_values, others, [each.detach().clone() for each in others])
        yield


def _restore_buffer_objects(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    for key, buffer in buffers.items():
        if module._buffers.get(key) is not buffer:
            module._buffers[key] = buffer


def _restore_buffer_values(buffers: list[Tensor], kept: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)


def has_training_batch_norm(model: nn.Module) -> bool:
    """Whether an example's outputs depend on the others of its batch, through layers that torch knows."""
    return any(isinstance(each, _BatchNorm) and each.training for each in model.modules())
