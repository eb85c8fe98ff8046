"""Adam (Kingma and Ba, 2015), and AdamW, which differs in its decoupled weight decay (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from saltflat.studies.optimizers import OptimizerRule, gather_setting, register_optimizer
from saltflat.studies.recipe import Recipe


def _make_adam(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    # A study may write 0 for 0.0, which torch refuses.
    betas = (float(recipe.beta1), float(recipe.beta2))
    return torch.optim.Adam(parameters, lr=float(recipe.lr), betas=betas, eps=recipe.eps)


def _list_adam_state(recipes: Sequence[Recipe]) -> tuple[str, ...]:
    return ("mean", "square")


def _compute_adam_factors(recipes: Sequence[Recipe], rates: Tensor, before: int) -> dict[str, Tensor]:
    steps = torch.arange(before + 1, before + 1 + len(rates), dtype=torch.float64)[:, None]
    first, second = gather_setting(recipes, "beta1"), gather_setting(recipes, "beta2")
    return {
        "new": (1 - first).expand_as(rates),
        "old_square": second.expand_as(rates),
        "new_square": (1 - second).expand_as(rates),
        "size": rates / (1 - first**steps),
        "unbias": (1 - second**steps).rsqrt(),
        "eps": gather_setting(recipes, "eps").expand_as(rates),
    }


def _step_adam(weights: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> None:
    mean, square = memory["mean"], memory["square"]
    mean.lerp_(gradient, factors["new"].expand_as(mean))
    square.mul_(factors["old_square"]).add_(gradient.square_().mul_(factors["new_square"]))
    spread = torch.sqrt(square, out=gradient).mul_(factors["unbias"]).add_(factors["eps"])
    weights.addcmul_(mean.div(spread), factors["size"], value=-1)


_ADAM = OptimizerRule("adam", _make_adam, _list_adam_state, _compute_adam_factors, _step_adam)
register_optimizer(_ADAM)
register_optimizer(replace(_ADAM, name="adamw", decoupled=True))
