"""Dropout with given masks, so that networks drop the same units batched and alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from saltflat.studies.recipe import Recipe
from saltflat.studies.schema import DTYPES
from saltflat.studies.training.examples import derive_seed


class Dropout(nn.Module):
    """Drop units in training by a mask that the training sets; the identity in eval mode."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input times the mask in training, and the input otherwise."""
        return x * self.mask if self.training and self.mask.ndim else x


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
    """The dropout masks of several networks in one epoch, each drawn from its network's own generator."""

    shapes: Mapping[str, tuple[int, ...]]
    generators: Sequence[torch.Generator | None]
    share: Tensor
    factor: Tensor

    @classmethod
    def from_recipes(
        cls, shapes: Mapping[str, tuple[int, ...]], recipes: Sequence[Recipe], epoch: int, device: torch.device
    ) -> DropoutMasks | None:
        """Return the masks of an epoch; None if nothing is dropped."""
        if not shapes or all(recipe.dropout == 0 for recipe in recipes):
            return None
        kept = torch.tensor([[1 - recipe.dropout] for recipe in recipes], dtype=torch.float64)
        dtype = DTYPES[recipes[0].dtype]
        return cls(
            shapes,
            [_make_dropout_generator(recipe, epoch, device) for recipe in recipes],
            (1 - kept).to(device, torch.float32),
            (1 / kept).to(device, dtype),
        )

    def draw(self, batch: int) -> dict[str, Tensor]:
        """Draw the masks of the next step, by name, networks first, then examples."""
        numbers = sum(map(prod, self.shapes.values()))
        # In float32 for every precision, so that the dropped units do not depend on it.
        draws = torch.ones(len(self.generators), batch * numbers, device=self.share.device)
        for row, source in zip(draws, self.generators, strict=True):
            if source is not None:
                row.uniform_(generator=source)
        masks = (draws >= self.share) * self.factor
        parts = masks.split([batch * prod(shape) for shape in self.shapes.values()], dim=1)
        return {
            name: part.reshape(-1, batch, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def _make_dropout_generator(recipe: Recipe, epoch: int, device: torch.device) -> torch.Generator | None:
    if recipe.dropout == 0:
        return None
    return torch.Generator(device).manual_seed(derive_seed(recipe.seed, "dropout", epoch))
