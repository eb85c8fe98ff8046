"""The points of a slice: a line or a square around the weights, with the weights themselves in the middle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saltflat.amounts import MOST, check_positive
from saltflat.errors import OptionError

MOST_POINTS = 250_000  # a slip of the keyboard beyond


@dataclass(frozen=True)
class SliceGrid:
    """Where the loss is taken.

    Attributes:
        dimensions: 1 or 2.
        points: along each direction, an odd number.
        radius: how far the outermost points are from the middle, in lengths of the direction.
    """

    dimensions: int
    points: int
    radius: float

    @property
    def axis(self) -> Tensor:
        """The coordinates along one direction, float64; the middle one is 0 exactly.

        >>> SliceGrid(1, 5, 2.0).axis.tolist()
        [-2.0, -1.0, 0.0, 1.0, 2.0]
        """
        steps = torch.arange(self.points, dtype=torch.float64) * 2 - (self.points - 1)
        return steps * (self.radius / (self.points - 1))

    @property
    def places(self) -> Tensor:
        """``(points ** dimensions, dimensions)``: the coordinates of every point, the last one changes fastest."""
        axes = torch.meshgrid(*[self.axis] * self.dimensions, indexing="ij")
        return torch.stack([each.flatten() for each in axes], 1)

    @property
    def middle(self) -> int:
        """The number of the point in the middle, where the weights are as given."""
        return int((self.points**self.dimensions) // 2)

    @property
    def neighbours(self) -> list[int]:
        """The numbers of the point in the middle and of its next neighbour along each direction."""
        return [self.middle, *(self.middle + self.points**axis for axis in range(self.dimensions))]


def make_grid(dimensions: int, points: int, radius: float) -> SliceGrid:
    """The grid, if it can be one."""
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions not in (1, 2):
        raise OptionError(
            f"Got dimensions={dimensions!r}. Want 1 for a curve or 2 for a map. Do: take several slices for more."
        )
    if isinstance(points, bool) or not isinstance(points, int) or points < 3 or points % 2 == 0 or points > MOST:
        raise OptionError(
            f"Got points={points!r}. Want an odd number of at least 3, so that the weights themselves are the point in "
            "the middle. Do: for instance points=21."
        )
    if points**dimensions > MOST_POINTS:
        raise OptionError(
            f"Got points={points!r} in {dimensions} dimensions, {points**dimensions:,} passes over the data. Want at "
            f"most {MOST_POINTS:,}. Do: for instance points=51."
        )
    check_positive(radius=radius)
    return SliceGrid(dimensions, points, float(radius))
