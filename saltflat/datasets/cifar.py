"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), read without running their pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltflat.datasets import Reader, register_reader
from saltflat.datasets.arrays import is_existing_file, make_missing_file_error, read_verified_bytes
from saltflat.errors import DataError

SHAPE = (3, 32, 32)


def read_cifar(folder: Path, dataset: str, files: Sequence[tuple[str, str]], key: str) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 3, 32, 32)`` and labels of these files, concatenated.

    Args:
        dataset: torchvision's name.
        files: the path in ``folder`` and the md5 of each file.
        key: the key of the labels.
    """
    images, labels = [], []
    for name, md5 in files:
        path = folder / name
        if not is_existing_file(path):
            raise make_missing_file_error(path, dataset)
        pixels, classes = parse_cifar(read_verified_bytes(path, md5), path, key)
        images.append(pixels)
        labels.append(classes)
    return torch.cat(images), torch.cat(labels)


def parse_cifar(content: bytes, path: Path, key: str) -> tuple[Tensor, Tensor]:
    """Return images and labels of one file, without running its pickle."""
    try:
        found = _SafeUnpickler(io.BytesIO(content), encoding="bytes").load()
        rows, classes = found[b"data"].to_numpy(), found[key.encode()]
        images = torch.from_numpy(rows.reshape(-1, *SHAPE).copy())
        labels = torch.tensor(classes, dtype=torch.int64)
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
    except Exception as error:  # a malformed pickle can fail in any way
        raise DataError(
            f"Expected pixels under 'data' and labels under {key!r}, but got {str(path)!r}, which is not a file of "
            f"CIFAR ({error}). Try to delete it and download it again."
        ) from error
    return images, labels


class _PickledDtype:
    """Record what a pickle says about an array's type."""

    def __init__(self, code: bytes | str, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Ignore byte order and fields, which bytes do not have."""


class _PickledArray:
    """Record what a pickle says about an array, without passing it to numpy."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def to_numpy(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        _, shape, kind, columns_first, numbers = self.state
        if kind.code not in (b"u1", "u1") or columns_first:
            raise ValueError(f"an array of type {kind.code!r}, columns first: {columns_first}")
        return np.frombuffer(numbers, np.uint8).reshape(shape)


# Python 2 wrote the first; recent versions of numpy write the second.
ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledDtype,
}


class _SafeUnpickler(pickle.Unpickler):
    """Accept only the names that an array needs, and record their arguments instead of calling numpy.

    Each name maps to a class with its own ``__setstate__``: a pickle can fill its instances, but not change the class.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not needed for pixels and was not run")
        return ADMITTED[module, name]


# As torchvision lists them.
CIFAR10_FILES = {
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
    return read_cifar(folder, "CIFAR10", CIFAR10_FILES[split], "labels")


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

# As torchvision lists them.
CIFAR100_FILES = {
    "train": [("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d")],
    "test": [("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc")],
}


def _read_cifar100(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    return read_cifar(folder, "CIFAR100", CIFAR100_FILES[split], "fine_labels")


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
