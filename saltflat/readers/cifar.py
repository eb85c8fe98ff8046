"""The format of CIFAR: a pickle with rows of pixels, read without letting the pickle do anything."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltflat.errors import DataError
from saltflat.readers.checksum import is_existing_file, make_missing_file_error, read_verified_bytes

SHAPE = (3, 32, 32)


def read_cifar(folder: Path, dataset: str, files: Sequence[tuple[str, str]], key: str) -> tuple[Tensor, Tensor]:
    """Images ``(N, 3, 32, 32)`` and labels of these files, joined.

    Args:
        dataset: torchvision's name.
        files: path in ``folder`` and md5 of each.
        key: under which the labels are.
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
    """Images and labels in one file, whatever else its pickle asks for."""
    try:
        found = _SafeUnpickler(io.BytesIO(content), encoding="bytes").load()
        rows, classes = found[b"data"].to_numpy(), found[key.encode()]
        images = torch.from_numpy(rows.reshape(-1, *SHAPE).copy())
        labels = torch.tensor(classes, dtype=torch.int64)
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
    except Exception as error:  # a pickle that is not what it should be can fail in any way
        raise DataError(
            f"Got {str(path)!r}, which is not a file of CIFAR ({error}). Want pixels under 'data' and labels under "
            f"{key!r}. Do: delete it and download it again."
        ) from error
    return images, labels


class _PickledDtype:
    """What a pickle says of an array's type, noted."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and fields, which bytes do not have."""


class _PickledArray:
    """What a pickle says of an array, noted; numpy is not asked to follow it."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        _, shape, kind, columns_first, numbers = self.state
        if kind.code not in (b"u1", "u1") or columns_first:
            raise ValueError(f"an array of type {kind.code!r}, columns first: {columns_first}")
        return np.frombuffer(numbers, np.uint8).reshape(shape)


# Python 2 wrote the first; newer versions of numpy write the second.
ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledDtype,
}


class _SafeUnpickler(pickle.Unpickler):
    """Knows the names that an array takes, and notes what numpy would have been asked to do instead of asking it.

    They stand for classes with a ``__setstate__`` of their own: a pickle can fill their objects, not change them.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not needed for pixels and was not run")
        return ADMITTED[module, name]
