"""In which numbers a network is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What a recipe's dtype means for tensors; tf32 differs from float32 only inside of products.
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@contextmanager
def products_of(dtype: str) -> Iterator[None]:
    """All digits in matrix products and convolutions on a GPU; or, with tf32, three, which is quicker."""
    cudnn, before, short = torch.backends.cudnn, torch.get_float32_matmul_precision(), dtype == "tf32"
    with cudnn.flags(cudnn.enabled, cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=short):
        torch.set_float32_matmul_precision("high" if short else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
