"""The examples a network sees: their order, augmentation and noisy labels, each from its own random draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from saltflat.errors import DataError, make_unknown_name_error
from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.training.draws import draw_words, make_generator


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
FIELD = 2**20  # bits of a word that decide about one coordinate
ACROSS = 40  # place of the second coordinate's bits
# Types by their number of bytes.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Augmentation:
    """How training images are augmented: each padded with zeros, cropped at random, and mirrored or not.

    Attributes:
        flip: whether half of the images are mirrored, left to right.
        padding: pixels of padding around an image before the crop.
    """

    flip: bool
    padding: int

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Augmentation | None:
        """Return the augmentation of a recipe; None for none."""
        if recipe.augment == "none":
            return None
        return cls("flip" in recipe.augment, recipe.crop if "crop" in recipe.augment else 0)

    def pad(self, images: Tensor) -> Tensor:
        """Return all images with their padding, channels last, to be read by :meth:`read`.

        All channels of a pixel are one word where there is a type of its size, since reading takes as long for a word
        as for a number. Other channels are padded with zeros up to that size.
        """
        padded = F.pad(images.movedim(1, -1), (0, 0, *(self.padding,) * 4))
        size = images.element_size()
        wide = next((each for each in WORDS if each >= size * images.shape[1]), None)
        if wide is None:
            return padded.contiguous()
        channels = wide // size
        return F.pad(padded, (0, channels - images.shape[1])).contiguous().view(WORDS[wide])

    def draw(self, keys: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return which images are mirrored, and where each crop begins, down and across along the last axis.

        Args:
            keys: key of each network in this epoch, ``(networks, 1)``.
            places: numbers of the examples, ``(networks, examples)``.
        """
        words = draw_words(keys, places + 1)
        starts = torch.stack([words % FIELD, (words >> ACROSS) % FIELD], dim=-1) % (2 * self.padding + 1)
        return (words.bitwise_and(FIELD) != 0) & self.flip, starts

    def read(self, padded: Tensor, like: Tensor, which: Tensor, mirrored: Tensor, starts: Tensor) -> Tensor:
        """Return the images with these numbers, each cropped and mirrored.

        Args:
            padded: result of :meth:`pad` for all images.
            like: one of the images before, for its shape and precision.
            which: numbers of the images, of any shape.
            mirrored: which of them are mirrored.
            starts: where each crop begins, down and across.

        Example:
            >>> image = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
            >>> flipped, first = Augmentation(flip=True, padding=0), torch.tensor([0])
            >>> flipped.read(flipped.pad(image[None]), image, first, torch.tensor([True]), torch.tensor([[0, 0]]))
            tensor([[[[2., 1.], [4., 3.]]]])
            >>> cropped = Augmentation(flip=False, padding=1)
            >>> cropped.read(cropped.pad(image[None]), image, first, torch.tensor([False]), torch.tensor([[0, 1]]))
            tensor([[[[0., 0.], [1., 2.]]]])
        """
        channels, height, width = like.shape
        place = torch.arange(max(height, width), device=padded.device)
        rows = place[:height] + starts[..., :1].reshape(-1, 1)
        columns = place[:width] + starts[..., 1:].reshape(-1, 1)
        columns = torch.where(mirrored.reshape(-1, 1), columns.flip(1), columns)
        found = padded[which.reshape(-1, 1, 1), rows[:, :, None], columns[:, None, :]].view(like.dtype)
        return found[..., :channels].movedim(-1, 1).reshape(*which.shape, channels, height, width)


NOISE_KINDS = ("permuted", "uniform")


@dataclass(frozen=True)
class TrainingSet:
    """The training examples of one network.

    Attributes:
        chosen: numbers of its examples in the data; None for the first ones.
        labels: labels the network is trained on.
        measured: number of examples that losses and measures use; the confusion set comes after them.
        data: inputs of the whole data set.
    """

    chosen: Tensor | None
    labels: Tensor
    measured: int
    data: Tensor

    @property
    def inputs(self) -> Tensor:
        """The inputs of the training examples."""
        return self.data[: len(self.labels)] if self.chosen is None else self.data[self.chosen]


SUBSET_KINDS = ("first", "random")


def make_training_set(recipe: Recipe, examples: Examples) -> TrainingSet:
    """Return the ``train_size`` examples of a network, some with random labels, followed by the confusion set.

    The labels depend on the recipe's seed, subset and label noise alone. More noise randomizes more labels, including
    those that less noise randomizes.
    """
    available, device = len(examples.train_labels), examples.train_labels.device
    measured, trained = count_training_examples(recipe, available)
    chosen = None
    if recipe.train_subset == "random":
        order = torch.randperm(available, generator=make_generator(recipe.seed, "subset"))
        chosen = order[:trained].to(device)
    labels = examples.train_labels[:trained].clone() if chosen is None else examples.train_labels[chosen]
    # Drawn on the CPU, so that a GPU trains on the same labels.
    labels[:measured] = add_label_noise(labels[:measured].cpu(), recipe, examples.classes).to(device)
    if recipe.confusion:
        draws = torch.randint(
            examples.classes,
            (recipe.confusion,),
            generator=make_generator(recipe.seed, "confusion"),
            dtype=labels.dtype,
        )
        labels[measured:] = draws.to(device)
    return TrainingSet(chosen, labels, measured, examples.train_inputs)


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
