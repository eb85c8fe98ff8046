"""Stochastic gradient descent, with momentum and Nesterov momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from saltflat.studies.optimizers import OptimizerRule, gather_setting, register_optimizer
from saltflat.studies.recipe import Recipe


def _make_sgd(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    # torch refuses Nesterov without momentum, where it changes nothing.
    ahead = recipe.nesterov and recipe.momentum > 0
    return torch.optim.SGD(parameters, lr=recipe.lr, momentum=recipe.momentum, nesterov=ahead)


def _list_sgd_state(recipes: Sequence[Recipe]) -> tuple[str, ...]:
    return ("velocity",) if any(recipe.momentum for recipe in recipes) else ()


def _compute_sgd_factors(recipes: Sequence[Recipe], rates: Tensor, before: int) -> dict[str, Tensor]:
    factors = {"rate": rates}
    if _list_sgd_state(recipes):
        factors["momentum"] = gather_setting(recipes, "momentum").expand_as(rates)
        if recipes[0].nesterov:
            factors["ahead"] = factors["momentum"]
    return factors


def _step_sgd(weights: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> None:
    direction = gradient
    if "momentum" in factors:
        velocity = memory["velocity"]
        torch.addcmul(gradient, velocity, factors["momentum"], out=velocity)  # one pass over the memory
        direction = gradient.addcmul_(velocity, factors["ahead"]) if "ahead" in factors else velocity
    weights.addcmul_(direction, factors["rate"], value=-1)


register_optimizer(OptimizerRule("sgd", _make_sgd, _list_sgd_state, _compute_sgd_factors, _step_sgd))
