"""What every form can do, by default from the gradients written out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from saltflat.errorbars import variance_of_mean

# Intermediate products are taken in pieces of about this many elements: on a CPU they then stay in the second-level
# cache (the difference is a factor of two for convolutions), on a GPU it only bounds memory.
CPU_PIECE = 1 << 18
GPU_PIECE = 1 << 26


class Geometry(Protocol):
    """How an array of the parameter's shape is ``(groups, out, in, positions)``; see :mod:`saltflat.geometry`."""

    @property
    def inputs_first(self) -> bool: ...

    def matrices(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Layout:
    """How the columns are arranged: ``fixed`` ones first, then ``draws`` equal groups of random ones."""

    fixed: int
    draws: int = 0
    size: int = 0

    @property
    def total(self) -> int:
        return self.fixed + self.draws * self.size

    def groups(self) -> list[slice]:
        start = self.fixed
        return [slice(start + d * self.size, start + (d + 1) * self.size) for d in range(self.draws)]


class Form(ABC):
    """Gradients of one parameter for ``columns`` columns and ``examples`` examples."""

    shape: torch.Size
    columns: int
    examples: int

    @abstractmethod
    def dense(self) -> Tensor:
        """``(columns, examples, *shape)``: the definition."""

    @abstractmethod
    def select(self, examples: slice) -> Form:
        """The same for some of the examples."""

    @abstractmethod
    def part(self, columns: slice) -> Form:
        """The same for some of the columns."""

    def joined(self, other: Form) -> Form:
        """The sum of two uses of one parameter, before anything is squared."""
        return Dense(self.dense() + other.dense())

    def squares(self) -> Tensor:
        """``shape``: sum over columns and examples of the squared gradient."""
        return reduce(torch.add, (square_sum(part.dense()).sum(0) for part in self.pieces()))

    def spread(self, layout: Layout) -> Tensor:
        """``(2, *shape)``: how random columns scatter :meth:`squares`.

        Sums over examples of the variances, and of their squares.
        """

        def one(part: Form) -> Tensor:
            square = part.dense().square()
            variance = variance_of_mean(torch.stack([square[group].sum(0) for group in layout.groups()]))
            return torch.stack([variance.sum(0), variance.square().sum(0)])

        return reduce(torch.add, (one(part) for part in self.pieces()))

    def norms(self, groups: Sequence[slice]) -> Tensor:
        """``(groups, examples)``: squared length of the gradient, summed over each group of columns."""
        parts = [lengths(_flat(part.dense()), 2) for part in self.pieces()]
        return grouped(torch.cat(parts, 1), groups)

    def project(self, direction: Tensor) -> Tensor:
        """``(columns, examples)``: inner products of the gradients with one direction."""
        flat = direction.reshape(-1)
        return torch.cat([_flat(part.dense()) @ flat for part in self.pieces()], 1)

    def expand(self, coefficients: Tensor) -> Tensor:
        """``shape``: the sum over columns and examples of coefficient times gradient."""
        parts, start = [], 0
        for part in self.pieces():
            weights = coefficients[:, start : start + part.examples]
            parts.append(torch.tensordot(weights, part.dense(), 2))
            start += part.examples
        total: Tensor = reduce(torch.add, parts)
        return total

    def unit_squares(self, direction: Tensor, unit: Tensor, units: int) -> Tensor:
        """``(units,)``: inner products with a direction, unit by unit, squared and summed over columns and examples.

        ``unit`` has the parameter's shape and says which unit each entry belongs to.
        """
        weight, unit, total = direction.reshape(-1), unit.reshape(-1), direction.new_zeros(units)
        for part in self.pieces():
            products = (_flat(part.dense()) * weight).flatten(0, 1)
            inner = products.new_zeros(len(products), units).index_add_(1, unit, products)
            total += inner.square().sum(0)
        return total

    def row_products(self, geometry: Geometry, scale: Tensor | None) -> Tensor:
        """``(groups, out, out)``: inner products between the gradients of output units, over columns and examples.

        ``scale`` has the parameter's shape and multiplies the gradients first.
        """
        total = None
        for part in self.pieces():
            dense = part.dense().flatten(0, 1)
            dense = dense if scale is None else dense * scale
            rows = torch.stack([geometry.matrices(each).flatten(2) for each in dense])  # (b, groups, out, in)
            wide = rows.permute(1, 2, 0, 3).flatten(2)
            total = wide @ wide.mT if total is None else total.add_(wide @ wide.mT)
        assert total is not None
        return total

    def gram(self, other: Form) -> Tensor:
        """``(examples, examples of other)``: inner products between gradients of two sets of examples, one column."""
        return _flat(self.dense())[0] @ _flat(other.dense())[0].mT

    def pieces(self) -> Iterator[Form]:
        """The form in slices of examples whose dense gradients have a bounded size."""
        step = piece(self.columns * max(1, self.shape.numel()), self.device)
        for start in range(0, self.examples, step):
            yield self.select(slice(start, start + step))

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Bytes held for one example: those that do not depend on the column, those of one column."""

    def _per_column(self, factor: Tensor) -> int:
        return factor.numel() * factor.element_size() // (self.examples * factor.shape[0])


def piece(elements: int, device: torch.device) -> int:
    """How many examples of so many elements each are worked on at once."""
    return max(1, (CPU_PIECE if device.type == "cpu" else GPU_PIECE) // max(1, elements))


def _flat(gradients: Tensor) -> Tensor:
    return gradients.reshape(*gradients.shape[:2], -1)


def square_sum(factor: Tensor) -> Tensor:
    """Sum of squares over the columns, without the array of squares."""
    total = factor[0].square()
    for column in factor[1:]:
        total.addcmul_(column, column)
    return total


def lengths(vectors: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """Squared lengths along some axes, without the array of squares."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=axes)
    return lengths.square_()


def grouped(per_column: Tensor, groups: Sequence[slice]) -> Tensor:
    return torch.stack([per_column[group].sum(0) for group in groups])


class Dense(Form):
    """Gradients written out: ``(columns, examples, *shape)``."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.columns, self.examples = values.shape[:2]
        self.shape = values.shape[2:]

    def dense(self) -> Tensor:
        return self.values

    def select(self, examples: slice) -> Dense:
        return Dense(self.values[:, examples])

    def part(self, columns: slice) -> Dense:
        return Dense(self.values[columns])

    def sizes(self) -> tuple[int, int]:
        return 0, self._per_column(self.values)

    @property
    def device(self) -> torch.device:
        return self.values.device
