"""Fashion-MNIST (Xiao, Rasul and Vollgraf): articles of clothing in the form of MNIST."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from saltflat.readers import Reader, register_reader
from saltflat.readers.idx import read_idx

# As torchvision lists them. It unpacks each beside its .gz; where only that is left, there is no published checksum.
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def _read_fashion_mnist(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    return read_idx(folder, split, "FashionMNIST", CHECKSUMS)


register_reader(
    # Mean and deviation as they are commonly given for this data set.
    Reader(
        "fashion-mnist",
        "clothing, 1 x 28 x 28, 10 classes",
        read=_read_fashion_mnist,
        top=255,
        mean=(0.2860,),
        std=(0.3530,),
    )
)
