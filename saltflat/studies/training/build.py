"""Build a network from its recipe: architecture, initialization, precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from saltflat.engine.precision import set_precision, snapshot_precision
from saltflat.studies.networks import find_network
from saltflat.studies.recipe import Recipe
from saltflat.studies.schema import DTYPES, INITIALIZERS, check_recipe
from saltflat.studies.training.draws import derive_seed


@contextmanager
def use_matmul_precision(dtype: str) -> Iterator[None]:
    """Use full precision in matrix products and convolutions on a GPU; or, with ``"tf32"``, three digits."""
    back = snapshot_precision()
    try:
        set_precision("tf32" if dtype == "tf32" else "ieee")
        yield
    finally:
        back()


@torch.no_grad()
def initialize_weights(model: nn.Module, recipe: Recipe) -> None:
    """Draw the weights of all linear layers and convolutions with the recipe's initializer; set their biases to zero.

    With ``"default"`` they stay as the network made them. In both cases they are multiplied by ``init_scale``.
    """
    for module in model.modules():
        if not isinstance(module, nn.Linear | _ConvNd):
            continue
        if recipe.init != "default":
            INITIALIZERS[recipe.init](module.weight)
            if module.bias is not None:
                module.bias.zero_()
        if recipe.init_scale != 1:
            module.weight.mul_(recipe.init_scale)


def build_network(recipe: Recipe, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network in eval mode on the CPU, with weights that depend on the recipe's seed alone.

    They are drawn in float32, so that a float64 training starts from the same numbers.

    Args:
        recipe: its network, architecture, seed, initialization and dtype are used.
        shape: shape of one input.
        classes: number of outputs.
    """
    check_recipe(recipe)
    kept = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        # Seed the CPU alone: torch.manual_seed would also reseed the generators of GPUs.
        torch.default_generator.manual_seed(derive_seed(recipe.seed, "weights"))
        try:
            model = find_network(recipe.network).build_model(shape, classes, recipe.architecture)
            initialize_weights(model, recipe)
        finally:
            torch.set_default_dtype(kept)
    return model.to(DTYPES[recipe.dtype]).eval()
