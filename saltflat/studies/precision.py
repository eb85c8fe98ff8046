"""In which numbers a network is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from saltflat.loan import set_precision, snapshot_precision

# What a recipe's dtype means for tensors; tf32 differs from float32 only inside of products.
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@contextmanager
def use_matmul_precision(dtype: str) -> Iterator[None]:
    """All digits in matrix products and convolutions on a GPU; or, with tf32, three, which is quicker."""
    back = snapshot_precision()
    try:
        set_precision("high" if dtype == "tf32" else "highest")
        yield
    finally:
        back()
