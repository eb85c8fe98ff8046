"""MNIST and Fashion-MNIST, in the IDX format."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from saltflat.datasets import Reader, register_reader
from saltflat.datasets.arrays import is_existing_file, make_missing_file_error, read_file_bytes, read_verified_bytes
from saltflat.errors import DataError

UNSIGNED_BYTE = 0x08
STEMS = {"train": "train", "test": "t10k"}


def read_idx(folder: Path, split: str, dataset: str, checksums: Mapping[str, str]) -> tuple[Tensor, Tensor]:
    """Return images ``(N, 1, rows, columns)`` and labels of one split, from torchvision's folder ``dataset/raw``.

    Args:
        checksums: md5 by file name. Of a file and its ``.gz``, the first one listed here that exists is read. An
            unlisted file is read only if no listed one exists, and then only its format is checked.
    """
    stem, raw = STEMS[split], folder / dataset / "raw"
    images = _read_idx_array(raw, f"{stem}-images-idx3-ubyte", dataset, checksums)
    labels = _read_idx_array(raw, f"{stem}-labels-idx1-ubyte", dataset, checksums)
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"Expected as many labels as images, but got images of shape {tuple(images.shape)} and labels of shape "
            f"{tuple(labels.shape)} in {str(raw)!r}. Try to delete the files and download them again."
        )
    return images.unsqueeze(1), labels.to(torch.int64)


def _read_idx_array(raw: Path, name: str, dataset: str, checksums: Mapping[str, str]) -> Tensor:
    listed = [file for file in checksums if file in (name, f"{name}.gz")]
    for file in [*listed, name]:
        path = raw / file
        if is_existing_file(path):
            content = read_verified_bytes(path, checksums[file]) if file in checksums else read_file_bytes(path)
            return parse_idx(_decompress_gzip(content, path) if path.suffix == ".gz" else content, path)
    raise make_missing_file_error(raw / name, dataset)


def _decompress_gzip(content: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _make_idx_error(path, f"no whole gzip file ({error})") from error


def parse_idx(content: bytes, path: Path) -> Tensor:
    """Return the array in an IDX file of unsigned bytes.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), Path("labels"))
        tensor([7, 8, 9], dtype=torch.uint8)
    """
    if len(content) < 4 or content[:3] != bytes([0, 0, UNSIGNED_BYTE]):
        raise _make_idx_error(path, f"a file that begins with {content[:4].hex(' ') or 'nothing'}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise _make_idx_error(path, "a file that ends within its sizes")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise _make_idx_error(path, f"{len(content) - start:,} numbers for the shape {shape}")
    try:
        # Copied, since bytes are read-only and tensors are not.
        return torch.from_numpy(np.frombuffer(content[start:], np.uint8).reshape(shape).copy())
    except (ValueError, RuntimeError) as error:  # too many axes, or empty ones of absurd lengths
        raise _make_idx_error(path, f"{len(shape)} axes that no array can have ({error})") from error


def _make_idx_error(path: Path, got: str) -> DataError:
    return DataError(
        f"Expected an IDX file of bytes, but got {got} in {str(path)!r}. Try to delete it and download it again."
    )


# Those of .gz files are torchvision's; the others are of their unpacked contents.
MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def _read_mnist(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    return read_idx(folder, split, "MNIST", MNIST_CHECKSUMS)


register_reader(
    Reader(
        "mnist", "handwritten digits, 1 x 28 x 28, 10 classes", read=_read_mnist, top=255, mean=(0.1307,), std=(0.3081,)
    )
)

# As in torchvision, which unpacks each file beside its .gz; unpacked files have no published checksum.
FASHION_CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def _read_fashion_mnist(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    return read_idx(folder, split, "FashionMNIST", FASHION_CHECKSUMS)


register_reader(
    # Mean and standard deviation as commonly given for this data set.
    Reader(
        "fashion-mnist",
        "clothing, 1 x 28 x 28, 10 classes",
        read=_read_fashion_mnist,
        top=255,
        mean=(0.2860,),
        std=(0.3530,),
    )
)
