"""The examples a network is trained on, with labels made random where its recipe says so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saltflat.errors import DataError, make_unknown_name_error
from saltflat.studies.draws import make_generator
from saltflat.studies.examples import Examples
from saltflat.studies.recipe import Recipe

KINDS = ("permuted", "uniform")


@dataclass(frozen=True)
class TrainingSet:
    """What one network is trained on.

    Attributes:
        inputs: of all examples that are trained on.
        labels: as the network sees them.
        measured: losses and measures look at the first so many; behind them is the confusion set.
    """

    inputs: Tensor
    labels: Tensor
    measured: int


def make_training_set(recipe: Recipe, examples: Examples) -> TrainingSet:
    """The first ``train_size`` examples, some with random labels, and the confusion set behind them.

    The labels depend on the recipe's seed and its settings of noise alone, and are where the examples are. A larger
    share of noise makes more labels random, those of a smaller share among them.
    """
    measured, trained = count_training_examples(recipe, len(examples.train_labels))
    labels = examples.train_labels[:trained].clone()
    # Drawn on the CPU, so that a GPU trains on the same labels.
    labels[:measured] = add_label_noise(labels[:measured].cpu(), recipe, examples.classes).to(labels.device)
    if recipe.confusion:
        draws = torch.randint(
            examples.classes,
            (recipe.confusion,),
            generator=make_generator(recipe.seed, "confusion"),
            dtype=labels.dtype,
        )
        labels[measured:] = draws.to(labels.device)
    return TrainingSet(examples.train_inputs[:trained], labels, measured)


def count_training_examples(recipe: Recipe, available: int) -> tuple[int, int]:
    """How many examples are measured, and how many trained on."""
    measured = available - recipe.confusion if recipe.train_size is None else recipe.train_size
    trained = measured + recipe.confusion
    if measured < 1 or trained > available:
        raise DataError(
            f"Got train_size={recipe.train_size} and confusion={recipe.confusion} with {available} training examples. "
            f"Want at least one example to measure on, and together at most {available}. Do: ask for fewer."
        )
    return measured, trained


def add_label_noise(labels: Tensor, recipe: Recipe, classes: int) -> Tensor:
    """The labels after a random part of them was permuted among itself, or drawn anew."""
    draws = make_generator(recipe.seed, "noise")
    # 0.29 * 100 is a little less than 29, which nobody means.
    count = math.floor(recipe.label_noise * len(labels) + 1e-9)
    chosen = torch.randperm(len(labels), generator=draws)[:count]
    found = labels.clone()
    if recipe.label_noise_kind == "permuted":
        found[chosen] = labels[chosen[torch.randperm(count, generator=draws)]]
    elif recipe.label_noise_kind == "uniform":
        found[chosen] = torch.randint(classes, (count,), generator=draws, dtype=labels.dtype)
    else:
        raise make_unknown_name_error("kind of label noise", recipe.label_noise_kind, KINDS)
    return found
