"""How the learning rate changes over a training."""

from __future__ import annotations

import math
from collections.abc import Callable

from saltflat.errors import make_unknown_name_error
from saltflat.studies.recipe import Recipe


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
