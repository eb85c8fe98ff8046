"""A network as its recipe says, before training."""

from __future__ import annotations

import torch
from torch import nn

from saltflat.studies.checking import checked
from saltflat.studies.draws import seed_of
from saltflat.studies.initialisation import initialise
from saltflat.studies.networks import network
from saltflat.studies.precision import DTYPES
from saltflat.studies.recipe import Recipe


def built(recipe: Recipe, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network in eval mode on the CPU, with weights that depend on the recipe's seed alone.

    They are drawn in float32, so that a float64 training starts from the same numbers.

    Args:
        recipe: of which the network, its architecture, the seed, the initialisation and the dtype matter here.
        shape: of one input.
        classes: how many outputs.
    """
    checked(recipe)
    kept = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        # Of the CPU alone: torch.manual_seed would move the generators of GPUs, too.
        torch.default_generator.manual_seed(seed_of(recipe.seed, "weights"))
        try:
            model = network(recipe.network).made(shape, classes, recipe.architecture)
            initialise(model, recipe)
        finally:
            torch.set_default_dtype(kept)
    return model.to(DTYPES[recipe.dtype]).eval()
