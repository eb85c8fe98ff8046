"""Dropout with given masks, so that networks drop the same units batched and alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from saltflat.studies.recipe import Recipe
from saltflat.studies.training.draws import compute_lanes, draw_lanes, draw_short_numbers, draw_words

LEVELS = 2**16  # probabilities are rounded to multiples of 1 / LEVELS


class Dropout(nn.Module):
    """Drop units in training by a mask that the training sets; the identity in eval mode."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input times the mask in training, and the input otherwise."""
        return (x * self.mask).to(x.dtype) if self.training and self.mask.ndim else x


@torch.no_grad()
def find_mask_shapes(model: nn.Module, example: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shape of each dropout layer's input for one example, by the name of its mask, in eval mode."""
    shapes: dict[str, tuple[int, ...]] = {}
    layers = {f"{name}.mask": module for name, module in model.named_modules() if isinstance(module, Dropout)}
    hooks = [
        layer.register_forward_hook(lambda _, inputs, __, name=name: shapes.update({name: tuple(inputs[0].shape[1:])}))
        for name, layer in layers.items()
    ]
    try:
        if layers:
            model(example[None])
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


@dataclass(frozen=True)
class DropoutMasks:
    """The dropout masks of several networks, functions of a network's key and the number of an example.

    Attributes:
        shapes: shape of each mask for one example, by name.
        least: smallest number of 16 bits that keeps a unit, for each network.
        factor: factor of the units that are kept, for each network.
        lanes: what a compiled step draws numbers with; None for other steps.
    """

    shapes: Mapping[str, tuple[int, ...]]
    least: Tensor
    factor: Tensor
    lanes: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_recipes(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        recipes: Sequence[Recipe],
        dtype: torch.dtype,
        device: torch.device,
    ) -> DropoutMasks | None:
        """Return the masks of these networks; None if nothing is dropped."""
        if not shapes or all(recipe.dropout == 0 for recipe in recipes):
            return None
        dropped = [min(round(recipe.dropout * LEVELS), LEVELS - 1) for recipe in recipes]
        least = torch.tensor([each - LEVELS // 2 for each in dropped], dtype=torch.int16)
        factor = torch.tensor([LEVELS / (LEVELS - each) for each in dropped], dtype=torch.float64)
        return cls(shapes, least.to(device), factor.to(device, dtype))

    def prepare_compiling(self) -> DropoutMasks:
        """Return the same masks, drawn by operations that a compiler can fuse."""
        return replace(self, lanes=compute_lanes(sum(map(prod, self.shapes.values())), self.least.device))

    def draw(self, keys: Tensor, places: Tensor) -> dict[str, Tensor]:
        """Return the masks of a step, by name, networks first, then examples.

        Args:
            keys: key of each network in this epoch, ``(networks, 1)``.
            places: numbers of the examples, ``(networks, examples)``.
        """
        sizes = [prod(shape) for shape in self.shapes.values()]
        words = draw_words(keys, places + 1)
        numbers = draw_short_numbers(words, sum(sizes)) if self.lanes is None else draw_lanes(words, *self.lanes)
        # Networks that drop nothing keep the smallest number, too.
        least, factor = self.least[:, None, None], self.factor[:, None, None]
        return {
            name: ((part >= least) * factor).unflatten(-1, shape)
            for (name, shape), part in zip(self.shapes.items(), numbers.split(sizes, dim=-1), strict=True)
        }
