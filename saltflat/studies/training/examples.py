"""The examples a network sees: their order, augmentation and noisy labels, each from its own random draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn import functional as F

from saltflat.errors import DataError, make_unknown_name_error
from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe


def derive_seed(*what: int | str) -> int:
    """Return a seed for these words and numbers, the same on every machine.

    Example:
        >>> seed = derive_seed(0, "order", 1)
        >>> seed == derive_seed(0, "order", 1), seed == derive_seed(0, "order", 2)
        (True, False)
    """
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1


def make_generator(*what: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a random generator of its own for this purpose."""
    return torch.Generator(device).manual_seed(derive_seed(*what))


def draw_order(seed: int, epoch: int, count: int) -> Tensor:
    """Return a random order of the examples of an epoch, which depends on the seed and the epoch alone.

    Example:
        >>> draw_order(0, 3, 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    return torch.randperm(count, generator=make_generator(seed, "order", epoch))


def count_steps(count: int, batch_size: int) -> int:
    """Return the number of steps in an epoch of ``count`` examples; the last batch may be smaller.

    Example:
        >>> count_steps(10, 4)
        3
    """
    return -(-count // batch_size)


AUGMENTATION_KINDS = ("none", "flip", "crop", "flip_crop")


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of each image of an epoch, in the order of training.

    Attributes:
        mirrored: whether the image is mirrored, left to right.
        moved: where the crop begins in the padded image, down and across.
        padding: pixels of zero padding around the image before the crop.
    """

    mirrored: Tensor
    moved: Tensor
    padding: int

    @classmethod
    def draw(cls, recipe: Recipe, epoch: int, count: int) -> Augmentation | None:
        """Draw the augmentation of an epoch on the CPU, from the seed and the epoch alone; None for no augmentation."""
        if recipe.augment == "none":
            return None
        draws = make_generator(recipe.seed, "augment", epoch)
        padding = recipe.crop if "crop" in recipe.augment else 0
        mirrored = torch.randint(2, (count,), generator=draws, dtype=torch.bool) & ("flip" in recipe.augment)
        return cls(mirrored, torch.randint(2 * padding + 1, (count, 2), generator=draws), padding)

    @classmethod
    def stack(cls, changes: list[Augmentation], device: torch.device) -> Augmentation:
        """Return the augmentations of several networks, networks first."""
        return cls(
            torch.stack([each.mirrored for each in changes]).to(device),
            torch.stack([each.moved for each in changes]).to(device),
            changes[0].padding,
        )

    def select_range(self, begin: int, end: int) -> Augmentation:
        """Return the augmentation of a range of images, for one network or many."""
        return Augmentation(self.mirrored[..., begin:end], self.moved[..., begin:end, :], self.padding)


def augment_images(images: Tensor, changes: Augmentation) -> Tensor:
    """Return the images, each padded, cropped and mirrored.

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


NOISE_KINDS = ("permuted", "uniform")


@dataclass(frozen=True)
class TrainingSet:
    """The training examples of one network.

    Attributes:
        inputs: inputs of all training examples.
        labels: labels the network is trained on.
        measured: number of examples that losses and measures use; the confusion set comes after them.
    """

    inputs: Tensor
    labels: Tensor
    measured: int


def make_training_set(recipe: Recipe, examples: Examples) -> TrainingSet:
    """Return the first ``train_size`` examples, some with random labels, followed by the confusion set.

    The labels depend on the recipe's seed and label noise alone. More noise randomizes more labels, including those
    that less noise randomizes.
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
    """Return the number of examples that are measured, and the number that are trained on."""
    measured = available - recipe.confusion if recipe.train_size is None else recipe.train_size
    trained = measured + recipe.confusion
    if measured < 1 or trained > available:
        raise DataError(
            f"Expected at least one example to measure on, and together at most {available}, but got "
            f"train_size={recipe.train_size} and confusion={recipe.confusion} with {available} training examples. "
            "Try smaller numbers."
        )
    return measured, trained


def add_label_noise(labels: Tensor, recipe: Recipe, classes: int) -> Tensor:
    """Return the labels after permuting a random part of them, or drawing that part anew."""
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
        raise make_unknown_name_error("kind of label noise", recipe.label_noise_kind, NOISE_KINDS)
    return found
