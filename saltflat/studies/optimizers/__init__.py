"""Optimizers, each twice: torch's own for one network, and a step for many networks at once.

Weights of many networks are rows of one matrix, and every setting may differ from row to row. Two things are the same
for all optimizers and are done here: ``l2 * w`` is added to the gradient, and decoupled weight decay shrinks ``w`` by
``1 - rate * weight_decay``, both with the weights before the step.
"""

from __future__ import annotations

import math
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
    """A rule by which gradients change weights.

    Attributes:
        name: what a recipe calls it.
        alone: torch's own, without decay of either kind, for the parameters of one network.
        memory: names of what it remembers of each weight, zero at first.
        plan: factors of all steps of an epoch by name, each ``(steps, networks)`` in float64: from the recipes, the
            learning rates and the number of steps taken before. What is the same as not there is left out.
        step: changes the weights ``(networks, weights)`` in place; takes them, the gradient (which it may change), the
            memory and the factors of this step, ``(networks, 1)`` each.
    """

    name: str
    alone: Callable[[Iterable[nn.Parameter], Recipe], torch.optim.Optimizer]
    memory: Callable[[Sequence[Recipe]], tuple[str, ...]]
    plan: Callable[[Sequence[Recipe], Tensor, int], dict[str, Tensor]]
    step: Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], None]


def register_optimizer(optimizer: OptimizerRule) -> None:
    OPTIMIZERS[optimizer.name] = optimizer


def find_optimizer(name: str) -> OptimizerRule:
    if name not in OPTIMIZERS:
        raise make_unknown_name_error("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def stack_setting(recipes: Sequence[Recipe], setting: str) -> Tensor:
    """One setting of every network, in float64."""
    return torch.tensor([float(getattr(recipe, setting)) for recipe in recipes], dtype=torch.float64)


@dataclass(frozen=True)
class StepFactors:
    """The factors of every step of an epoch, on the device and in the precision of the weights."""

    optimizer: OptimizerRule
    factors: Mapping[str, Tensor]

    @classmethod
    def from_recipes(cls, recipes: Sequence[Recipe], rates: Tensor, before: int, weights: Tensor) -> StepFactors:
        """For learning rates ``(steps, networks)`` after so many steps.

        Factors are taken in float64 and rounded last: 1 - 0.999 has only four digits in float32.
        """
        optimizer = find_optimizer(recipes[0].optimizer)
        factors = optimizer.plan(recipes, rates, before)
        if bool(stack_setting(recipes, "l2").any()):
            factors["l2"] = stack_setting(recipes, "l2").expand_as(rates)
        if bool(stack_setting(recipes, "weight_decay").any()):
            factors["kept"] = 1 - rates * stack_setting(recipes, "weight_decay")
        return cls(
            optimizer,
            {name: each.to(weights.device, weights.dtype).unsqueeze(-1) for name, each in factors.items()},
        )

    def select_step(self, number: int) -> dict[str, Tensor]:
        """The factors of the step of this number in the epoch."""
        return {name: each[number] for name, each in self.factors.items()}


def step_together(
    optimizer: OptimizerRule,
    weights: Tensor,
    gradient: Tensor,
    memory: Mapping[str, Tensor],
    factors: Mapping[str, Tensor],
) -> None:
    """One step of all networks, with these factors of it."""
    if "l2" in factors:
        gradient.addcmul_(weights, factors["l2"])
    if "kept" in factors:
        weights.mul_(factors["kept"])
    optimizer.step(weights, gradient, memory, factors)


@torch.no_grad()
def step_alone(optimizer: torch.optim.Optimizer, recipe: Recipe, rate: float) -> None:
    """One step of one network at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        for parameter in group["params"]:
            if parameter.grad is None:  # not used in this pass: as if its gradient were zero
                parameter.grad = torch.zeros_like(parameter)
            if recipe.l2:
                parameter.grad.add_(parameter, alpha=recipe.l2)
            if recipe.weight_decay:
                parameter.mul_(1 - rate * recipe.weight_decay)
    optimizer.step()


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def _constant(recipe: Recipe, epoch: int, step: int) -> float:
    return 1.0


def _cosine(recipe: Recipe, epoch: int, step: int) -> float:
    return (1 + math.cos(math.pi * epoch / recipe.epochs)) / 2


def _steps(recipe: Recipe, epoch: int, step: int) -> float:
    # 0.3 * 10 is a little more than 3, which nobody means.
    passed = sum(epoch >= share * recipe.epochs - 1e-9 for share in recipe.milestones)
    return float(recipe.decay**passed)


def _inverse(recipe: Recipe, epoch: int, step: int) -> float:
    return 1 / (1 + recipe.decay * step)


SCHEDULES: dict[str, Callable[[Recipe, int, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "steps": _steps,
    "inverse": _inverse,
}


def compute_learning_rate(recipe: Recipe, epoch: int, step: int) -> float:
    """The learning rate of a step: ``epoch`` and ``step`` are how many of each were finished before it.

    Example:
        >>> compute_learning_rate(Recipe(lr=0.4, schedule="steps", epochs=10, decay=0.5), epoch=7, step=0)
        0.2
    """
    if recipe.schedule not in SCHEDULES:
        raise make_unknown_name_error("schedule", recipe.schedule, SCHEDULES)
    return recipe.lr * SCHEDULES[recipe.schedule](recipe, epoch, step)
