"""A network as its recipe says, before training."""

from __future__ import annotations

import torch
from torch import nn

from saltflat.studies.checking import check_recipe
from saltflat.studies.draws import derive_seed
from saltflat.studies.initialisation import initialise_weights
from saltflat.studies.networks import find_network
from saltflat.studies.precision import DTYPES
from saltflat.studies.recipe import Recipe


def build_network(recipe: Recipe, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network in eval mode on the CPU, with weights that depend on the recipe's seed alone.

    They are drawn in float32, so that a float64 training starts from the same numbers.

    Args:
        recipe: of which the network, its architecture, the seed, the initialisation and the dtype matter here.
        shape: of one input.
        classes: how many outputs.
    """
    check_recipe(recipe)
    kept = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        # Of the CPU alone: torch.manual_seed would move the generators of GPUs, too.
        torch.default_generator.manual_seed(derive_seed(recipe.seed, "weights"))
        try:
            model = find_network(recipe.network).build_model(shape, classes, recipe.architecture)
            initialise_weights(model, recipe)
        finally:
            torch.set_default_dtype(kept)
    return model.to(DTYPES[recipe.dtype]).eval()
