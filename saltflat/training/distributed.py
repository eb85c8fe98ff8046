"""Multiple processes and loss scaling: averaged gradients, sharded weights, GradScaler."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.errors import ModelError, TrainingError


@torch.no_grad()
def average_gradients(
    model: DistributedDataParallel, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the mean of every parameter's gradient over all processes.

    A parameter that some processes do not use has a gradient of zero there; one that none uses has no gradient.
    """
    group = model.process_group
    results: dict[str, Tensor] = {}
    for kind in dict.fromkeys((p.device, p.dtype) for p in parameters.values()):
        names = [name for name, p in parameters.items() if (p.device, p.dtype) == kind]
        values = [gradients[name] if name in gradients else torch.zeros_like(parameters[name]) for name in names]
        used = torch.tensor([float(name in gradients) for name in names], device=kind[0], dtype=kind[1])
        # One message, since many small ones would dominate the transfer time.
        message = torch.cat([used, *(each.reshape(-1) for each in values)])
        dist.all_reduce(message, group=group)
        message[len(names) :] /= dist.get_world_size(group)
        pieces = message[len(names) :].split([each.numel() for each in values])
        for name, value, piece, count in zip(names, values, pieces, message[: len(names)].tolist(), strict=True):
            if count:
                results[name] = value.copy_(piece.view(value.shape))
    return results


WRAPPERS = ("FullyShardedDataParallel", "FSDPModule")


def check_not_sharded(model: nn.Module, how: str = "") -> None:
    """Check that every process holds all of the weights.

    Args:
        model: the module to measure or to train.
        how: what is known to shard them, if anything.
    """
    wrapped = any(kind.__name__ in WRAPPERS for each in model.modules() for kind in type(each).__mro__)
    parts = (
        f"{name!r}, of which each process has a part"
        for name, p in model.named_parameters()
        if isinstance(p, DTensor) or type(p).__name__ == "FlatParameter" or hasattr(p, "ds_id")
    )
    spread = how or ("a model whose weights are spread over processes" if wrapped else next(parts, ""))
    if spread:
        raise ModelError(
            f"Expected a model whose weights are whole on every process, but got {spread}. Try training with "
            "DistributedDataParallel, or measuring a checkpoint afterwards with saltflat.measure."
        )


def check_not_unscaled(scaler: GradScaler | None, optimizer: Optimizer) -> None:
    """Check that the scaler has not unscaled the first gradient."""
    states = getattr(scaler, "_per_optimizer_states", {})
    if id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED":
        raise TrainingError(
            "Expected a first gradient that is still scaled, but got one that the GradScaler has unscaled. It unscales "
            "once per step, and the step uses the second gradient. Try calling scaler.unscale_() before second_step() "
            "only."
        )


def get_gradient_scale(scaler: GradScaler | None) -> float:
    """Return the scale of the first gradient."""
    if scaler is None:
        raise TrainingError(
            "Expected two gradients of the same scale, but got a second one that a GradScaler has unscaled and a first "
            "one that it has not. Try calling first_step(scaler)."
        )
    return scaler.get_scale()
