"""The Fisher penalty (Jia and Su, 2020, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.parts import compute_part_sizes
from saltflat.training.shift import has_training_batch_norm


def _prepare_penalty(model: nn.Module, optimizer: Optimizer, recipe: Recipe) -> OwnGradient:
    penalties: dict[bool, FisherPenalty] = {}

    def compute_gradient(objective: Objective, batch: StepTensors, epoch: int) -> Tensor:
        # Masks are set on the modules, which vmap does not allow.
        masked = len(batch) > 2
        if masked not in penalties:
            penalties[masked] = FisherPenalty(
                model,
                parts=recipe.fisher_parts,
                alpha=recipe.fisher_alpha,
                beta=recipe.fisher_penalty,
                clip=recipe.fisher_clip,
                start_epoch=recipe.fisher_start_epoch,
                objective=objective,
                strategy="loop" if masked else "auto",
                # The objective is a mean over the examples.
                whole=has_training_batch_norm(model),
            )
        penalty = penalties[masked]
        penalty.set_epoch(epoch)
        optimizer.zero_grad()
        loss = penalty.backward(batch)
        if recipe.fisher_clip is not None:
            penalty.clip()
        return loss

    return compute_gradient


def _plan_penalty(recipes: Sequence[Recipe], epoch: int) -> dict[str, Tensor]:
    factors = {"alpha": gather_setting(recipes, "fisher_alpha")}
    active = torch.tensor([epoch >= recipe.fisher_start_epoch for recipe in recipes])
    if bool(active.any()):
        factors["beta"] = gather_setting(recipes, "fisher_penalty").where(active, 0.0)
    clips = [math.inf if recipe.fisher_clip is None else recipe.fisher_clip for recipe in recipes]
    if min(clips) < math.inf:
        factors["clip"] = torch.tensor(clips, dtype=torch.float64)
    return factors


def _compute_penalty(
    passes: BatchPasses, rows: Tensor, factors: Mapping[str, Tensor], recipe: Recipe
) -> tuple[Tensor, Tensor]:
    if "beta" not in factors:
        losses, gradient = passes.compute_gradient(rows)
    else:
        losses, gradient = _compute_penalized(passes, rows, factors, recipe.fisher_parts)
    if "clip" in factors:
        length = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient = gradient * (factors["clip"] / length).clamp(max=1.0)
    return losses, gradient


def _compute_penalized(
    passes: BatchPasses, rows: Tensor, factors: Mapping[str, Tensor], parts: int
) -> tuple[Tensor, Tensor]:
    count, begin = passes.count, 0
    # A single example cannot be normalized.
    most = max(1, count // 2) if passes.has_batch_norm else count
    sizes = compute_part_sizes(count, min(parts, most))
    # With BatchNorm parts are normalized separately, and the loss of the batch needs a pass of its own.
    if passes.has_batch_norm:
        losses, gradient = passes.compute_gradient(rows)
    else:
        losses, gradient = rows.new_zeros(len(rows)), torch.zeros_like(rows)
        passes.update_statistics(rows)
    for size in dict.fromkeys(sizes):
        many, share = sizes.count(size), size / count
        here = rows[:, None].expand(-1, many, -1)
        part_losses, first = passes.compute_part_gradients(here, begin, size)
        _, second = passes.compute_part_gradients(here - factors["alpha"][:, None] * first, begin, size)
        gradient = gradient + factors["beta"] * share * (first - second).sum(1)
        if not passes.has_batch_norm:
            gradient = gradient + share * first.sum(1)
            losses = losses + share * part_losses.sum(1)
        begin += many * size
    return losses, gradient


register_gradient_rule(
    GradientRule(
        "fisher_penalty", _prepare_penalty, _plan_penalty, _compute_penalty, shared=("fisher_parts",), splits=True
    )
)
