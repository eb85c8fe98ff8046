"""Gradients averaged over the processes of DistributedDataParallel, where its own hooks do not run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def average_gradients(
    model: DistributedDataParallel, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The mean of every parameter's gradient over all processes.

    A parameter that some processes do not use has a gradient of zero there; one that none uses has none.
    """
    group = model.process_group
    results: dict[str, Tensor] = {}
    for kind in dict.fromkeys((p.device, p.dtype) for p in parameters.values()):
        names = [name for name, p in parameters.items() if (p.device, p.dtype) == kind]
        values = [gradients[name] if name in gradients else torch.zeros_like(parameters[name]) for name in names]
        used = torch.tensor([float(name in gradients) for name in names], device=kind[0], dtype=kind[1])
        # In one message: many small ones would take longer than all the numbers.
        message = torch.cat([used, *(each.reshape(-1) for each in values)])
        dist.all_reduce(message, group=group)
        message[len(names) :] /= dist.get_world_size(group)
        pieces = message[len(names) :].split([each.numel() for each in values])
        for name, value, piece, count in zip(names, values, pieces, message[: len(names)].tolist(), strict=True):
            if count:
                results[name] = value.copy_(piece.view(value.shape))
    return results
