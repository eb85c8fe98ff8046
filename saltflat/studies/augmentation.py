"""Images shifted and mirrored at random while they are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from saltflat.studies.draws import make_generator
from saltflat.studies.recipe import Recipe

KINDS = ("none", "flip", "crop", "flip_crop")


@dataclass(frozen=True)
class Augmentation:
    """What is done to each image of an epoch, in the order in which they are seen.

    Attributes:
        mirrored: whether it is mirrored, left to right.
        moved: where the cut begins in the padded image, down and across.
        padding: pixels of zero around the image before the cut.
    """

    mirrored: Tensor
    moved: Tensor
    padding: int

    @classmethod
    def draw(cls, recipe: Recipe, epoch: int, count: int) -> Augmentation | None:
        """Of an epoch; None where images are left as they are. Drawn on the CPU, from the seed and the epoch alone."""
        if recipe.augment == "none":
            return None
        draws = make_generator(recipe.seed, "augment", epoch)
        padding = recipe.crop if "crop" in recipe.augment else 0
        mirrored = torch.randint(2, (count,), generator=draws, dtype=torch.bool) & ("flip" in recipe.augment)
        return cls(mirrored, torch.randint(2 * padding + 1, (count, 2), generator=draws), padding)

    @classmethod
    def stack(cls, changes: list[Augmentation], device: torch.device) -> Augmentation:
        """Of several networks, networks first."""
        return cls(
            torch.stack([each.mirrored for each in changes]).to(device),
            torch.stack([each.moved for each in changes]).to(device),
            changes[0].padding,
        )

    def select_range(self, begin: int, end: int) -> Augmentation:
        """Of some of the images in the order, for networks one or many."""
        return Augmentation(self.mirrored[..., begin:end], self.moved[..., begin:end, :], self.padding)


def augment_images(images: Tensor, changes: Augmentation) -> Tensor:
    """Every image cut out of its padded self where its change says, and mirrored.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> augment_images(image, Augmentation(torch.tensor([True]), torch.tensor([[0, 0]]), 0))
        tensor([[[[2., 1.], [4., 3.]]]])
        >>> augment_images(image, Augmentation(torch.tensor([False]), torch.tensor([[0, 1]]), 1))
        tensor([[[[0., 0.], [1., 2.]]]])
    """
    *_, channels, height, width = images.shape
    flat = images.reshape(-1, channels, height, width)
    mirrored, moved = changes.mirrored.reshape(-1, 1), changes.moved.reshape(-1, 2)
    place = torch.arange(max(height, width), device=images.device)
    rows = place[:height] + moved[:, :1]
    columns = place[:width] + moved[:, 1:]
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = F.pad(flat, (changes.padding,) * 4) if changes.padding else flat
    which = torch.arange(len(flat), device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[which, channel, rows[:, None, :, None], columns[:, None, None, :]].reshape(images.shape)
