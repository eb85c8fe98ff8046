"""Distributions over weights with independent entries, and the random numbers they are drawn with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

BLOCK = 32  # examples whose random numbers are drawn at once, whatever the batches are
BLOCK_NUMBERS = 1 << 20  # of a block of more than one example


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution over weights with independent entries.

    Attributes:
        mean: of every parameter, by name.
        deviation: the standard deviations.
    """

    mean: Mapping[str, Tensor]
    deviation: Mapping[str, Tensor]
    numbers: ClassVar[int] = 1  # random ones for each weight

    def combine(self, name: str, draw: Callable[[str], Tensor]) -> Tensor:
        """Return weights made of standard normal numbers, which ``draw`` returns for a label."""
        return self.mean[name] + self.deviation[name] * draw(name)


@dataclass(frozen=True)
class ScaledGaussian:
    r"""Normal weights times log-normal factors, all independent.

    .. math::
        \theta_i = (m_i + d_i z_i) \, e^{s z'_i}, \qquad z_i, z'_i \sim N(0, 1)

    Attributes:
        mean: m of every parameter, by name: the value where nothing is random.
        deviation: d, the standard deviations of the normal part.
        spread: s, the standard deviation of the factors' logarithms.
    """

    mean: Mapping[str, Tensor]
    deviation: Mapping[str, Tensor]
    spread: float
    numbers: ClassVar[int] = 2

    def combine(self, name: str, draw: Callable[[str], Tensor]) -> Tensor:
        """Return weights made of standard normal numbers, which ``draw`` returns for a label."""
        normal = self.mean[name] + self.deviation[name] * draw(name)
        return normal * (self.spread * draw(f"{name}/factors")).exp()


WeightDistribution: TypeAlias = Gaussian | ScaledGaussian


class Noise:
    """Standard normal numbers of every example, the same however the examples are batched.

    Args:
        seed: of the numbers.
        draw: number of the draw.
    """

    def __init__(self, seed: int, draw: int) -> None:
        self.seed, self.draw = seed, draw

    def draw_rows(self, label: str, first: int, count: int, width: int, like: Tensor) -> Tensor:
        """Return ``(count, width)`` numbers for the examples from number ``first`` on."""
        size = BLOCK
        while size > 1 and size * width > BLOCK_NUMBERS:
            size //= 2
        start, stop = first // size, -(-(first + count) // size)
        blocks = []
        for block in range(start, stop):
            key = sha256(f"{self.seed}/{self.draw}/{label}/{block}".encode()).digest()
            generator = torch.Generator(like.device).manual_seed(int.from_bytes(key[:7], "little"))
            blocks.append(torch.randn(size, width, generator=generator, dtype=like.dtype, device=like.device))
        offset = first - start * size
        return torch.cat(blocks)[offset : offset + count]
