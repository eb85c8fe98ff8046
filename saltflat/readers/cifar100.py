"""CIFAR-100 (Krizhevsky, 2009): photographs as in CIFAR-10, of 100 classes; labels are the fine ones."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from saltflat.readers import Reader, register_reader
from saltflat.readers.cifar import read_cifar

# As torchvision lists them.
FILES = {
    "train": [("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d")],
    "test": [("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc")],
}


def _read_cifar100(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    return read_cifar(folder, "CIFAR100", FILES[split], "fine_labels")


register_reader(
    Reader(
        "cifar100",
        "photographs, 3 x 32 x 32, 100 classes",
        read=_read_cifar100,
        top=255,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    )
)
