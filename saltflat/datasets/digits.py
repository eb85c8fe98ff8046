"""The 1797 handwritten digits that come with scikit-learn, 8 x 8: the first 1200 to train, the rest to test."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from saltflat.datasets import Reader, register_reader
from saltflat.errors import DataError

TRAINING_EXAMPLES = 1200


def _read_digits(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"Expected scikit-learn, which contains the data set 'digits', but got an error when importing it "
            f"({error}). Try pip install scikit-learn."
        ) from error
    images, classes = load_digits(return_X_y=True)
    chosen = slice(None, TRAINING_EXAMPLES) if split == "train" else slice(TRAINING_EXAMPLES, None)
    inputs = torch.tensor(images[chosen], dtype=torch.uint8).reshape(-1, 1, 8, 8)
    return inputs, torch.tensor(classes[chosen], dtype=torch.int64)


register_reader(
    Reader(
        "digits", "handwritten digits, 1 x 8 x 8, 10 classes", read=_read_digits, top=16, mean=(0.3063,), std=(0.3755,)
    )
)
