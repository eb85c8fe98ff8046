"""What a GradScaler has done to the gradients of an optimizer that takes two of them."""

from __future__ import annotations

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from saltflat.errors import TrainingError


def check_not_unscaled(scaler: GradScaler | None, optimizer: Optimizer) -> None:
    """The first gradient must be left as it is."""
    states = getattr(scaler, "_per_optimizer_states", {})
    if id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED":
        raise TrainingError(
            "Got a first gradient that the GradScaler has unscaled. Want it left as it is: the scaler unscales once "
            "per step, and steps are taken with the second. Do: call scaler.unscale_() before second_step() only."
        )


def get_gradient_scale(scaler: GradScaler | None) -> float:
    """What the first gradient was scaled with."""
    if scaler is None:
        raise TrainingError(
            "Got a second gradient that a GradScaler has unscaled, and a first one that it has not. Want to know the "
            "scale of the first. Do: call first_step(scaler)."
        )
    return scaler.get_scale()
