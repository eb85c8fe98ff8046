"""MNIST (LeCun, Cortes and Burges): handwritten digits, 28 x 28, 60,000 to train and 10,000 to test."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from saltflat.readers import Reader, register_reader
from saltflat.readers.idx import read_idx

# Of the .gz as torchvision lists them; of the others as these unpack.
CHECKSUMS = {
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
    return read_idx(folder, split, "MNIST", CHECKSUMS)


register_reader(
    Reader(
        "mnist", "handwritten digits, 1 x 28 x 28, 10 classes", read=_read_mnist, top=255, mean=(0.1307,), std=(0.3081,)
    )
)
