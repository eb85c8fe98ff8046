"""What the second derivative of a loss at the outputs can look like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftmaxCurvature:
    """``mass * (diag(p) - p p')`` with ``p`` of shape ``(examples, positions, classes)``.

    ``axis`` is that of the classes in the outputs.
    """

    p: Tensor
    mass: Tensor
    axis: int
    shape: torch.Size

    def compute_quadratic_form(self, direction: Tensor) -> Tensor:
        """The sum of direction' B direction over the examples."""
        u = direction.movedim(self.axis, -1).reshape_as(self.p)
        mean = (self.p * u).sum(-1, keepdim=True)
        return (self.mass * (self.p * (u - mean).square()).sum(-1)).sum()

    def reshape_to_outputs(self, columns: Tensor) -> Tensor:
        """``(..., positions, classes)`` back to ``(..., *outputs)``."""
        lead = columns.shape[:-2]
        positions = [size for axis, size in enumerate(self.shape[1:], start=1) if axis != self.axis]
        return columns.reshape(*lead, *positions, columns.shape[-1]).movedim(-1, len(lead) - 1 + self.axis)


@dataclass(frozen=True)
class DiagonalCurvature:
    """One curvature per output, ``(examples, *outputs)``."""

    values: Tensor

    def compute_quadratic_form(self, direction: Tensor) -> Tensor:
        return (self.values * direction.square()).sum()


@dataclass(frozen=True)
class FactoredCurvature:
    """``sum_k columns_k columns_k'`` minus the same of ``negative``; each ``(rank, examples, *outputs)``."""

    columns: Tensor
    negative: Tensor | None

    def compute_quadratic_form(self, direction: Tensor) -> Tensor:
        def sum_squares(columns: Tensor) -> Tensor:
            return (columns * direction).reshape(*columns.shape[:2], -1).sum(2).square().sum()

        return sum_squares(self.columns) - (sum_squares(self.negative) if self.negative is not None else 0)


Curvature = SoftmaxCurvature | DiagonalCurvature | FactoredCurvature
