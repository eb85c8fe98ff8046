"""The observed Fisher matrix of all parameters, written out: for tiny models."""

from __future__ import annotations

import torch

from saltflat.gram import iterate_gradients
from saltflat.setting import NotDefinedError, Setting, StatisticResult
from saltflat.statistics import statistic

LARGEST = 2000


@statistic(
    per="network", meaning="Mean over examples of gradient times gradient', over all parameters at once.", passes=5
)
def fisher_matrix(setting: Setting) -> StatisticResult:
    """``(W, W)`` in float64 for W parameters."""
    size = sum(value.numel() for value in setting.problem.network.measured.values())
    if size > LARGEST:
        raise NotDefinedError(f"is for models of at most {LARGEST} parameters, and this one has {size}")
    total = torch.zeros(size, size, dtype=torch.float64)
    for rows in iterate_gradients(setting):
        total += rows.mT @ rows
    return StatisticResult(total / setting.examples)
