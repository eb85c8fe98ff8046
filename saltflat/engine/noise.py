"""Random directions in the space of all parameters, and the error of averages over them.

A draw is determined by the seed, the parameter's name and the number of the draw. It does not depend on the other
parameters, the batches or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from saltflat.engine.context import Context
from saltflat.results.jackknife import compute_student_factor


def draw_normals(context: Context, draw: int) -> dict[str, Tensor]:
    """Return standard normal numbers in the shape of every parameter, in float64."""
    return _draw_per_parameter(context, draw, lambda generator, shape: generator.standard_normal(shape))


def draw_signs(context: Context, draw: int) -> dict[str, Tensor]:
    """Return 1 or -1 with equal probability in the shape of every parameter, in float64."""
    return _draw_per_parameter(context, draw, lambda generator, shape: 1.0 - 2.0 * generator.integers(2, size=shape))


def _draw_per_parameter(
    context: Context, draw: int, sample: Callable[[np.random.Generator, torch.Size], object]
) -> dict[str, Tensor]:
    found = {}
    for name, value in context.problem.network.measured.items():
        own = int.from_bytes(sha256(f"{draw}/{name}".encode()).digest()[:8], "little")
        generator = np.random.Generator(np.random.Philox(key=[context.seed, own]))
        numbers = torch.as_tensor(sample(generator, value.shape), dtype=torch.float64)
        found[name] = numbers.reshape(value.shape).to(value.device)
    return found


def compute_mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent numbers, and the error e such that mean +- 1.96 e is a 95 % interval.

    The scatter of a few numbers is itself uncertain, so the error is multiplied by the ratio of Student's t to the
    normal quantile.

    >>> compute_mean_and_error([1.0, 3.0])  # 1 sqrt(2) / sqrt(2), stretched by 12.71 / 1.96
    (2.0, 6.48287...)
    """
    spread = np.std(values, ddof=1) / len(values) ** 0.5
    return float(np.mean(values)), float(spread * compute_student_factor(len(values) - 1))
