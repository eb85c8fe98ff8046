"""Other weights for the same function: what a scale-invariant measure must not notice."""

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import torch
from cases import Case
from chains import layers_of
from torch import Tensor, nn

LARGEST = 1e3


def layer_rescaled(case: Case, seed: int) -> Case:
    """Each layer's weights times a factor of its own, the product over all layers being one.

    A bias is multiplied by the product of the factors up to its own layer, so that the last bias stays.
    """
    model = deepcopy(case.model)
    layers = layers_of(model)
    so_far = 1.0
    with torch.no_grad():
        for (_, layer), factor in zip(layers, factors_of_product_one(len(layers), seed), strict=True):
            so_far *= factor
            layer.get_parameter("weight").mul_(factor)
            if layer.bias is not None and layer is not layers[-1][1]:
                layer.get_parameter("bias").mul_(so_far)
    return replace(case, model=model)


def unit_rescaled(case: Case, seed: int) -> Case:
    """Each hidden unit's incoming weights and bias times a factor of its own, its outgoing weights divided by it.

    The units of a convolution are its channels.
    """
    model = deepcopy(case.model)
    layers = [layer for _, layer in layers_of(model)]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for before, after in pairwise(layers):
            weight = before.get_parameter("weight")
            factors = log_uniform(len(weight), generator)
            weight.mul_(factors.reshape(-1, *[1] * (weight.ndim - 1)))
            if before.bias is not None:
                before.get_parameter("bias").mul_(factors)
            divide_inputs(after, factors)
    return replace(case, model=model)


def divide_inputs(layer: nn.Module, factors: Tensor) -> None:
    weight = layer.get_parameter("weight")
    if isinstance(layer, nn.Linear):
        # After a flattened image, a unit is a channel and owns a run of inputs.
        weight.div_(factors.repeat_interleave(weight.shape[1] // len(factors)))
    else:
        assert isinstance(layer, nn.Conv2d)
        grouped = weight.view(layer.groups, -1, *weight.shape[1:])
        grouped.div_(factors.reshape(layer.groups, 1, -1, 1, 1))


def factors_of_product_one(count: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        logs = log_uniform(count, generator).log()
        logs -= logs.mean()
        if logs.abs().max() <= math.log(LARGEST):
            factors: list[float] = logs.exp().tolist()
            return factors


def log_uniform(count: int, generator: torch.Generator) -> Tensor:
    exponents = 2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1
    return LARGEST**exponents
