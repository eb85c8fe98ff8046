"""What the weights are before training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.conv import _ConvNd

from saltflat.errors import make_unknown_name_error
from saltflat.studies.recipe import Recipe

SCHEMES: dict[str, Callable[[Tensor], object]] = {
    "xavier_normal": init.xavier_normal_,
    "xavier_uniform": init.xavier_uniform_,
    "kaiming_normal": lambda weight: init.kaiming_normal_(weight, nonlinearity="relu"),
    "kaiming_uniform": lambda weight: init.kaiming_uniform_(weight, nonlinearity="relu"),
    "normal": init.normal_,
    "uniform": lambda weight: init.uniform_(weight, -1.0, 1.0),
}


@torch.no_grad()
def initialise_weights(model: nn.Module, recipe: Recipe) -> None:
    """Draw the weights of all linear layers and convolutions as the recipe says, and set their biases to zero.

    With ``"default"`` they stay as the network made them. Either way they are multiplied by ``init_scale``.
    """
    if recipe.init != "default" and recipe.init not in SCHEMES:
        raise make_unknown_name_error("initialisation", recipe.init, ["default", *SCHEMES])
    for module in model.modules():
        if not isinstance(module, nn.Linear | _ConvNd):
            continue
        if recipe.init != "default":
            SCHEMES[recipe.init](module.weight)
            if module.bias is not None:
                module.bias.zero_()
        if recipe.init_scale != 1:
            module.weight.mul_(recipe.init_scale)
