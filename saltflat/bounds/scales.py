"""Scales of rows and columns: which entries of which parameters share one, and the grids that they are rounded to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import acosh, ceil, log, pi

import torch
from torch import Tensor

from saltflat.balance.box import balance_in_box
from saltflat.layers import Geometry

# The bound on curvatures and squared weights up to which entries outside the box cost at most 1 / sqrt(lambda) in all.
LARGEST = 100.0
# Natural logarithm of the sum over all integers k of (1 + |k|)^-2.
LOG_CODES = log(pi**2 / 3 - 1)


@dataclass(frozen=True)
class ScaleGrid:
    """Multiples of a step, as many on each side of 0.

    Attributes:
        step: the distance of neighbors.
        side: the number of positive ones.
    """

    step: float
    side: int

    @classmethod
    def build(cls, step: float, radius: float) -> ScaleGrid:
        """Return the smallest grid that reaches the radius.

        Example:
            >>> ScaleGrid.build(0.5, 1.2)
            ScaleGrid(step=0.5, side=3)
        """
        return cls(step, ceil(radius / step))

    @property
    def radius(self) -> float:
        """The largest number of the grid."""
        return self.step * self.side

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return 2 * self.side + 1

    def find_numbers(self, values: Tensor) -> Tensor:
        """Return the numbers, counted from 0 in the middle, of the nearest points of the grid."""
        return (values / self.step).round().clamp(-self.side, self.side)


def compute_radius(parameters: int) -> float:
    r"""Return :math:`R = \frac12 \ln(n M)`, with M = 100, for n parameters.

    An entry whose best scale lies outside of [-R, R] adds at most :math:`M e^{-2R} / \sqrt\lambda = 1 / (n
    \sqrt\lambda)` to the bound, if curvatures and squared weights are at most M.

    Example:
        >>> round(compute_radius(100), 4)  # ln(100)
        4.6052
    """
    return 0.5 * log(parameters * LARGEST)


def compute_step(epsilon: float, pairs: bool) -> float:
    r"""Return the step of the grid whose rounding multiplies the smallest sum by at most :math:`1 + \epsilon`.

    Rounding one logarithmic scale moves it by at most half a step :math:`\Delta`, and multiplies the sum of both
    exponentials by at most :math:`\cosh\Delta`. A row's and a column's scale together move by a whole step, which gives
    :math:`\cosh 2 \Delta`, and here :math:`(1 + \epsilon)^2`.

    Example:
        >>> from math import cosh
        >>> round(cosh(compute_step(0.1, False)), 9), round(cosh(2 * compute_step(0.1, True)), 9)
        (1.1, 1.21)
    """
    return acosh((1 + epsilon) ** 2) / 2 if pairs else acosh(1 + epsilon)


def compute_code_lengths(numbers: Tensor) -> Tensor:
    r"""Return the negative logarithm of the prior probability of each integer, proportional to :math:`(1 + |k|)^{-2}`.

    Example:
        >>> round(float(torch.exp(-compute_code_lengths(torch.arange(-10000.0, 10001.0))).sum()), 3)
        1.0
    """
    return 2 * numbers.abs().log1p() + LOG_CODES


def compute_pair_code(rows: Tensor, columns: Tensor) -> float:
    """Return the shortest code for integers of rows and columns of which only the sums matter.

    Adding a number to the rows and subtracting it from the columns changes no sum.

    Args:
        rows: ``(groups, rows)``.
        columns: ``(groups, columns)``.

    Example:
        >>> found = compute_pair_code(torch.tensor([[5.0, 5.0]]), torch.tensor([[-5.0]]))
        >>> round(found / LOG_CODES, 4)  # three zeros
        3.0
    """
    most = int(torch.cat([rows, columns], 1).abs().max())
    lengths = [
        compute_code_lengths(rows + shift).sum(1) + compute_code_lengths(columns - shift).sum(1)
        for shift in range(-most, most + 1)
    ]
    return float(torch.stack(lengths).amin(0).sum())


@dataclass(frozen=True)
class ScaleBlock:
    """Parameters whose entries share scales of rows and columns.

    Attributes:
        parts: parameters by name, with the number of the entry at each place, ``(groups, rows, columns, positions)``;
            their columns stand side by side.
        shapes: of the parameters.
        has_columns: whether columns have scales; each entry of a vector has one of its own, that of its row.
    """

    parts: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]
    has_columns: bool

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return sums over positions of values in the parameters' shapes, ``(groups, rows, columns)``."""
        return torch.cat([values[name].reshape(-1)[number].sum(3) for name, number in self.parts.items()], 2)

    def spread(self, values: Tensor) -> dict[str, Tensor]:
        """Return values at rows and columns in the parameters' shapes."""
        found, start = {}, 0
        for name, number in self.parts.items():
            stop = start + number.shape[2]
            flat = values.new_empty(number.numel())
            flat[number] = values[:, :, start:stop, None].expand(number.shape)
            found[name], start = flat.reshape(self.shapes[name]), stop
        return found

    @property
    def count(self) -> int:
        """The number of scales."""
        groups, rows, columns, _ = next(iter(self.parts.values())).shape
        columns += sum(number.shape[2] for number in list(self.parts.values())[1:])
        return groups * (rows + columns) if self.has_columns else groups * rows

    def minimize(self, F: Tensor, U: Tensor, radius: float) -> tuple[Tensor, Tensor, float, bool]:
        r"""Minimize :math:`\sum F e^{2(\gamma + \gamma')} + U e^{-2(\gamma + \gamma')}` over scales in a box.

        Args:
            F: curvatures, ``(groups, rows, columns)``.
            U: squared weights.
            radius: of the box.

        Returns:
            :math:`\gamma` of rows, :math:`\gamma'` of columns, the residual and whether it is below the tolerance.
        """
        if not self.has_columns:
            return find_best_scales(F, U, radius)[:, :, 0], F.new_zeros(len(F), 1), 0.0, True
        found = balance_in_box(F, U, 2 * radius)
        assert found.column_potentials is not None
        return found.potentials / 2, found.column_potentials / 2, found.residual, found.converged


def find_best_scales(F: Tensor, U: Tensor, radius: float) -> Tensor:
    r"""Return where :math:`F e^{2 \sigma} + U e^{-2 \sigma}` is smallest for every entry, in [-radius, radius].

    Where both are zero, any scale is best, and it is the smallest.

    Example:
        >>> find_best_scales(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0]), 3.0).tolist()
        [0.0, 3.0, -3.0]
    """
    return ((U.log() - F.log()) / 4).nan_to_num(-radius, radius, -radius).clamp(-radius, radius)


def list_blocks(weights: Mapping[str, Tensor], geometries: Mapping[str, Geometry]) -> list[ScaleBlock]:
    """Return the parameters in blocks that share scales: a weight and its layer's bias, or a vector.

    A bias is one more column of its weight, with a scale of its own: its input is always 1.
    """
    blocks: list[ScaleBlock] = []
    done: set[str] = set()
    for name, geometry in geometries.items():
        if name not in weights:
            continue
        shape = weights[name].shape
        number = geometry.view_as_matrices(torch.arange(shape.numel(), device=weights[name].device).reshape(shape))
        parts, shapes = {name: number}, {name: shape}
        bias = f"{name.rpartition('.')[0]}.bias".removeprefix(".")
        groups, rows = number.shape[:2]
        plain = type(geometry) is Geometry and name.rpartition(".")[2] == "weight"
        if plain and bias in weights and bias not in done and weights[bias].shape == (groups * rows,):
            own = torch.arange(groups * rows, device=number.device)
            parts[bias], shapes[bias] = own.reshape(groups, rows, 1, 1), weights[bias].shape
        blocks.append(ScaleBlock(parts, shapes, True))
        done |= parts.keys()
    for name, value in weights.items():
        if name not in done:
            number = torch.arange(value.numel(), device=value.device).reshape(1, -1, 1, 1)
            blocks.append(ScaleBlock({name: number}, {name: value.shape}, False))
    return blocks


def count_weight_scales(blocks: Sequence[ScaleBlock]) -> int:
    """Return the number of rows and columns of all weight matrices, without biases and other vectors."""
    weights = [next(iter(block.parts.values())) for block in blocks if block.has_columns]
    return sum(number.shape[0] * (number.shape[1] + number.shape[2]) for number in weights)
