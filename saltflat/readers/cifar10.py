"""CIFAR-10 (Krizhevsky, 2009): photographs, 32 x 32 in colour, 50,000 to train and 10,000 to test."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from saltflat.readers import Reader, register_reader
from saltflat.readers.cifar import read_cifar

# As torchvision lists them.
FILES = {
    "train": [
        ("cifar-10-batches-py/data_batch_1", "c99cafc152244af753f735de768cd75f"),
        ("cifar-10-batches-py/data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
        ("cifar-10-batches-py/data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
        ("cifar-10-batches-py/data_batch_4", "634d18415352ddfa80567beed471001a"),
        ("cifar-10-batches-py/data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
    ],
    "test": [("cifar-10-batches-py/test_batch", "40351d587109b95175f43aff81a1287e")],
}


def _read_cifar10(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    return read_cifar(folder, "CIFAR10", FILES[split], "labels")


register_reader(
    Reader(
        "cifar10",
        "photographs, 3 x 32 x 32, 10 classes",
        read=_read_cifar10,
        top=255,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )
)
