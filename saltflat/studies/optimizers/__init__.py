"""Optimizers, each in two versions: torch's own for one network, and a step for a batch of networks.

The weights of a batch of networks are the rows of one matrix, and every setting may differ between rows. Weight decay
is applied here, the same way for all optimizers: added to the gradient as ``weight_decay * w``, or, if decoupled,
multiplying ``w`` by ``1 - lr * weight_decay`` before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

import torch
from torch import Tensor, nn

from saltflat.errors import make_unknown_name_error
from saltflat.studies.recipe import Recipe

OPTIMIZERS: dict[str, OptimizerRule] = {}


@dataclass(frozen=True)
class OptimizerRule:
    """An optimizer.

    Attributes:
        name: its name in a recipe.
        alone: makes torch's optimizer, without weight decay, for the parameters of one network.
        memory: returns the names of its state tensors, which are zero at first.
        plan: returns the factors of all steps of an epoch by name, each ``(steps, networks)`` in float64, for recipes,
            learning rates and the number of steps taken before. Factors without effect are left out.
        step: changes the weights ``(networks, weights)`` in place, given the weights, the gradient (which it may
            change), the state and the factors of this step, ``(networks, 1)`` each.
        decoupled: whether weight decay multiplies the weights instead of being added to the gradient.
    """

    name: str
    alone: Callable[[Iterable[nn.Parameter], Recipe], torch.optim.Optimizer]
    memory: Callable[[Sequence[Recipe]], tuple[str, ...]]
    plan: Callable[[Sequence[Recipe], Tensor, int], dict[str, Tensor]]
    step: Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], None]
    decoupled: bool = False


def register_optimizer(optimizer: OptimizerRule) -> None:
    """Make an optimizer available to recipes under its name."""
    OPTIMIZERS[optimizer.name] = optimizer


def find_optimizer(name: str) -> OptimizerRule:
    """Return the optimizer of this name."""
    if name not in OPTIMIZERS:
        raise make_unknown_name_error("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def gather_setting(recipes: Sequence[Recipe], setting: str) -> Tensor:
    """Return one setting of every network, in float64."""
    return torch.tensor([float(getattr(recipe, setting)) for recipe in recipes], dtype=torch.float64)


def gather_decays(recipes: Sequence[Recipe]) -> tuple[Tensor, Tensor]:
    """Return the weight decay that is added to the gradient, and the one that multiplies the weights, of every network.

    Example:
        >>> gather_decays([Recipe(optimizer="adamw", weight_decay=0.1, decoupled_weight_decay=0.2)])
        (tensor([0.], dtype=torch.float64), tensor([0.3000], dtype=torch.float64))
    """
    decay, decoupled = (gather_setting(recipes, name) for name in ("weight_decay", "decoupled_weight_decay"))
    own = torch.tensor([find_optimizer(recipe.optimizer).decoupled for recipe in recipes])
    return decay.where(~own, 0.0), decoupled + decay.where(own, 0.0)


@dataclass(frozen=True)
class StepFactors:
    """The factors of every step of an epoch, on the device and in the precision of the weights."""

    optimizer: OptimizerRule
    factors: Mapping[str, Tensor]

    @classmethod
    def from_recipes(cls, recipes: Sequence[Recipe], rates: Tensor, before: int, weights: Tensor) -> StepFactors:
        """Compute the factors for learning rates ``(steps, networks)`` after ``before`` steps.

        They are computed in float64 and rounded last: 1 - 0.999 has only four digits in float32.
        """
        optimizer = find_optimizer(recipes[0].optimizer)
        factors = optimizer.plan(recipes, rates, before)
        coupled, decoupled = gather_decays(recipes)
        if bool(coupled.any()):
            factors["decay"] = coupled.expand_as(rates)
        if bool(decoupled.any()):
            factors["kept"] = 1 - rates * decoupled
        return cls(
            optimizer,
            {name: each.to(weights.device, weights.dtype).unsqueeze(-1) for name, each in factors.items()},
        )

    def select_step(self, number: int) -> dict[str, Tensor]:
        """Return the factors of one step of the epoch."""
        return {name: each[number] for name, each in self.factors.items()}


def step_together(
    optimizer: OptimizerRule,
    weights: Tensor,
    gradient: Tensor,
    memory: Mapping[str, Tensor],
    factors: Mapping[str, Tensor],
) -> None:
    """Take one step of a batch of networks with these factors."""
    if "decay" in factors:
        gradient.addcmul_(weights, factors["decay"])
    if "kept" in factors:
        weights.mul_(factors["kept"])
    optimizer.step(weights, gradient, memory, factors)


@torch.no_grad()
def step_alone(optimizer: torch.optim.Optimizer, recipe: Recipe, rate: float) -> None:
    """Take one step of one network at this learning rate."""
    coupled, decoupled = (float(each) for each in gather_decays([recipe]))
    for group in optimizer.param_groups:
        group["lr"] = rate
        for parameter in group["params"]:
            if parameter.grad is None:  # not used in this pass: as if its gradient were zero
                parameter.grad = torch.zeros_like(parameter)
            if coupled:
                parameter.grad.add_(parameter, alpha=coupled)
            if decoupled:
                parameter.mul_(1 - rate * decoupled)
    optimizer.step()


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
