"""Batches as they are against their examples one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import saltflat
from saltflat.statistics.compute import Statistics

NAMES = ["curvature_diagonal", "curvature_trace", "gradient_second_moment"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(count: int) -> Tensor:
    return torch.arange(count) % 3


def check_with_single_examples(model: nn.Module, batches: list[Any], **options: Any) -> Statistics:
    """The batches as they are, against all examples one by one."""
    whole = saltflat.compute_statistics(model, batches, names=NAMES, **options)
    singles = [
        (tuple(x[n : n + 1] for x in inputs) if isinstance(inputs, tuple) else inputs[n : n + 1], y[n : n + 1])
        for inputs, y in batches
        for n in range(len(y))
    ]
    alone = saltflat.compute_statistics(model, singles, names=NAMES, **options)
    for name in NAMES:
        for parameter in whole[name]:
            torch.testing.assert_close(whole[name][parameter], alone[name][parameter], rtol=1e-11, atol=1e-15)
    return whole
