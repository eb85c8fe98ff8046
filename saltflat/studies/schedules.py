"""Learning rates: how they change from epoch to epoch, and from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saltflat.errors import make_unknown_name_error
from saltflat.studies.recipe import Recipe

# Relative improvement of the loss that counts for "plateau", the default of torch's ReduceLROnPlateau.
THRESHOLD = 1e-4
SMALLEST_CHANGE = 1e-8  # of the learning rate, the default of torch's as well


def _constant(recipe: Recipe, epoch: int, step: int, curve: Sequence[float]) -> float:
    return 1.0


def _cosine(recipe: Recipe, epoch: int, step: int, curve: Sequence[float]) -> float:
    return (1 + math.cos(math.pi * epoch / recipe.epochs)) / 2


def _steps(recipe: Recipe, epoch: int, step: int, curve: Sequence[float]) -> float:
    # 0.3 * 10 is a little more than 3, which nobody means.
    passed = sum(epoch >= share * recipe.epochs - 1e-9 for share in recipe.milestones)
    return float(recipe.decay**passed)


def _inverse(recipe: Recipe, epoch: int, step: int, curve: Sequence[float]) -> float:
    return 1 / (1 + recipe.decay * step)


def _plateau(recipe: Recipe, epoch: int, step: int, curve: Sequence[float]) -> float:
    """Follow the whole curve again, so that a resumed training needs no state besides it."""
    best, waited, passed = math.inf, 0, 0
    for loss in curve[:epoch]:
        if loss < best * (1 - THRESHOLD):
            best, waited = loss, 0
        else:
            waited += 1
        if waited > recipe.patience:
            waited = 0
            # As in torch, changes that are too small are not made.
            passed += recipe.lr * recipe.decay**passed * (1 - recipe.decay) > SMALLEST_CHANGE
    return float(recipe.decay**passed)


SCHEDULES: dict[str, Callable[[Recipe, int, int, Sequence[float]], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "steps": _steps,
    "inverse": _inverse,
    "plateau": _plateau,
}
CHANGES_EVERY_STEP = ("inverse",)


def compute_learning_rate(
    recipe: Recipe, epoch: int, step: int, *, steps: int = 1, curve: Sequence[float] = ()
) -> float:
    """Return the learning rate of the step after ``epoch`` epochs and ``step`` steps.

    Args:
        recipe: its learning rate, schedule and warm-up are used.
        epoch: number of epochs done.
        step: number of steps done, in all epochs.
        steps: number of steps in an epoch, which a warm-up counts.
        curve: mean loss of each epoch done, which ``"plateau"`` follows.

    Example:
        >>> compute_learning_rate(Recipe(lr=0.4, schedule="steps", epochs=10, decay=0.5), epoch=7, step=0)
        0.2
        >>> [compute_learning_rate(Recipe(lr=0.4, warmup=2), epoch=0, step=step, steps=2) for step in range(5)]
        [0.1, 0.2, 0.3..., 0.4, 0.4]
    """
    if recipe.schedule not in SCHEDULES:
        raise make_unknown_name_error("schedule", recipe.schedule, SCHEDULES)
    rate = recipe.lr * SCHEDULES[recipe.schedule](recipe, epoch, step, curve)
    rising = recipe.warmup * steps
    return rate * (step + 1) / rising if step + 1 < rising else rate


def compute_epoch_rates(recipe: Recipe, epoch: int, steps: int, curve: Sequence[float]) -> Tensor:
    """Return the learning rates of all steps of an epoch, in float64."""
    first = epoch * steps
    changing = recipe.schedule in CHANGES_EVERY_STEP or first < recipe.warmup * steps
    count = steps if changing else 1
    rates = [
        compute_learning_rate(recipe, epoch, step, steps=steps, curve=curve) for step in range(first, first + count)
    ]
    return torch.tensor(rates, dtype=torch.float64).expand(steps)
