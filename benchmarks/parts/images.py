"""Images to measure on: from a data set if it is available, otherwise random."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saltflat import datasets

FOLDERS = {"mnist": ("MNIST", (1, 28, 28)), "cifar10": ("cifar-10-batches-py", (3, 32, 32))}


class Images(NamedTuple):
    inputs: Tensor
    labels: Tensor
    source: str


def images(name: str, count: int, normalize: str) -> Images:
    """Return the first training images from the folder SALTFLAT_DATA, or data."""
    folder = Path(os.environ.get("SALTFLAT_DATA", "data"))
    inside, shape = FOLDERS[name]
    if (folder / inside).is_dir():
        inputs, labels = datasets.read_data(name, folder, "train", limit=count, normalize=normalize)
        return Images(inputs, labels, f"{count} training images of {name}")
    noise = torch.Generator().manual_seed(0)
    return Images(
        torch.randn(count, *shape, generator=noise),
        torch.randint(10, (count,), generator=noise),
        f"{count} RANDOM images: {name} is not in the folder SALTFLAT_DATA",
    )
