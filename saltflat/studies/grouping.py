"""Which recipes can be trained in one stack."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from itertools import pairwise

from saltflat.studies.recipe import Recipe

# Settings that may differ between networks of one stack are not here.
SHARED = (
    "network", "optimizer", "nesterov", "batch", "train_size", "confusion", "augment", "crop", "dtype",
)  # fmt: skip


def compute_group_key(recipe: Recipe, shape: tuple[int, ...], classes: int) -> Hashable:
    """Equal for recipes whose networks are of one architecture and take the same steps.

    Seeds, learning rates, momentum, decay, dropout, label noise, initialisations, schedules, epochs and targets may
    differ.

    Example:
        >>> keys = {compute_group_key(Recipe(lr=lr, batch=batch), (64,), 10) for lr in (0.1, 0.2) for batch in (32, 64)}
        >>> len(keys)
        2
    """
    architecture = json.dumps(dict(recipe.architecture), sort_keys=True, default=list)
    return (tuple(shape), classes, architecture, *(getattr(recipe, name) for name in SHARED))


def group_runs(
    recipes_by_key: Mapping[str, Recipe], shape: tuple[int, ...], classes: int, most: int
) -> list[tuple[str, ...]]:
    """The keys of runs to train together, at most so many at once, of nearly the same number, in the order given.

    Example:
        >>> recipes = {name: Recipe(batch=32 if name == "b" else 64) for name in "abcd"}
        >>> group_runs(recipes, (64,), 10, most=2)
        [('a', 'c'), ('d',), ('b',)]
    """
    found: dict[Hashable, list[str]] = {}
    for key, recipe in recipes_by_key.items():
        found.setdefault(compute_group_key(recipe, shape, classes), []).append(key)
    return [part for keys in found.values() for part in _split_evenly(keys, most)]


def _split_evenly(keys: list[str], most: int) -> list[tuple[str, ...]]:
    count = -(-len(keys) // max(1, most))
    ends = [round(len(keys) * part / count + 1e-9) for part in range(count + 1)]
    return [tuple(keys[begin:end]) for begin, end in pairwise(ends)]
