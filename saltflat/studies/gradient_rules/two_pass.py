"""SAM (Foret et al., 2021), ASAM (Kwon et al., 2021) and the penalty of the gradient's norm (Zhao et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.studies.gradient_rules import (
    BatchPasses,
    GradientRule,
    Objective,
    OwnGradient,
    StepTensors,
    register_gradient_rule,
)
from saltflat.studies.optimizers import gather_setting
from saltflat.studies.recipe import Recipe
from saltflat.training.asam import ASAM
from saltflat.training.gradient_norm import GradientNormPenalty
from saltflat.training.sam import SAM
from saltflat.training.two_pass import TwoPass


def _prepare_alone(make: Callable[[nn.Module, Optimizer, Recipe], TwoPass]) -> Callable[..., OwnGradient]:
    def prepare(model: nn.Module, optimizer: Optimizer, recipe: Recipe) -> OwnGradient:
        wrapper = make(model, optimizer, recipe)

        def compute_gradient(objective: Objective, batch: StepTensors, epoch: int) -> Tensor:
            wrapper.zero_grad()
            with wrapper.first_pass():
                loss = objective(model, batch)
                loss.backward()
            wrapper.first_step()
            objective(model, batch).backward()
            wrapper.take_gradient()
            return loss.detach()

        return compute_gradient

    return prepare


def _plan_settings(**settings: str) -> Callable[[Sequence[Recipe], int], dict[str, Tensor]]:
    """Return a plan whose factors are these settings of the recipes."""

    def plan(recipes: Sequence[Recipe], epoch: int) -> dict[str, Tensor]:
        return {name: gather_setting(recipes, setting) for name, setting in settings.items()}

    return plan


def _ascend(gradient: Tensor, direction: Tensor, rho: Tensor) -> Tensor:
    """Return ``rho`` times the direction over the gradient's norm; zero where there is no gradient."""
    length = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    return direction * (rho * torch.where(length > 0, 1 / length, 0.0))


def _compute_sam(
    passes: BatchPasses, rows: Tensor, factors: Mapping[str, Tensor], recipe: Recipe
) -> tuple[Tensor, Tensor]:
    losses, gradient = passes.compute_gradient(rows)
    _, there = passes.compute_gradient(rows + _ascend(gradient, gradient, factors["rho"]), shifted=True)
    return losses, there


def _compute_asam(
    passes: BatchPasses, rows: Tensor, factors: Mapping[str, Tensor], recipe: Recipe
) -> tuple[Tensor, Tensor]:
    losses, gradient = passes.compute_gradient(rows)
    scale = torch.where(passes.is_bias, 1.0, rows.abs() + factors["eta"])
    once = scale * gradient
    _, there = passes.compute_gradient(rows + _ascend(once, scale * once, factors["rho"]), shifted=True)
    return losses, there


def _compute_gradient_norm(
    passes: BatchPasses, rows: Tensor, factors: Mapping[str, Tensor], recipe: Recipe
) -> tuple[Tensor, Tensor]:
    losses, gradient = passes.compute_gradient(rows)
    _, there = passes.compute_gradient(rows + _ascend(gradient, gradient, factors["rho"]), shifted=True)
    return losses, gradient.lerp(there, factors["balance"])


register_gradient_rule(
    GradientRule(
        "sam",
        _prepare_alone(lambda model, base, recipe: SAM(model, base, rho=recipe.sam)),
        _plan_settings(rho="sam"),
        _compute_sam,
    )
)
register_gradient_rule(
    GradientRule(
        "asam",
        _prepare_alone(lambda model, base, recipe: ASAM(model, base, rho=recipe.asam, eta=recipe.asam_eta)),
        _plan_settings(rho="asam", eta="asam_eta"),
        _compute_asam,
    )
)
register_gradient_rule(
    GradientRule(
        "gradient_norm",
        _prepare_alone(
            lambda model, base, recipe: GradientNormPenalty(
                model, base, rho=recipe.gradient_norm, balance=recipe.gradient_norm_balance
            )
        ),
        _plan_settings(rho="gradient_norm", balance="gradient_norm_balance"),
        _compute_gradient_norm,
    )
)
