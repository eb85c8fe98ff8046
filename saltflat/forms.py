"""Per-example gradients of one parameter, kept factored, and what can be contracted from them.

A form stands for the array ``gradient[k, n, ...]``: for column ``k`` and example ``n`` the gradient, with respect to
one parameter, of the inner product of the column with that example's outputs. ``dense`` builds that array and is the
definition; every other method has a default made from it, which a form replaces where it knows something quicker.

The last columns may be random draws of one quantity, ``draws`` of them with equally many columns each; ``spread`` says
how far their average scatters (:mod:`saltflat.errorbars`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from saltflat.errorbars import variance_of_mean
from saltflat.scratch import array

# Intermediate products are taken in pieces of about this many elements: on a CPU they then stay in the second-level
# cache (the difference is a factor of two for convolutions), on a GPU it only bounds memory.
CPU_PIECE = 1 << 18
GPU_PIECE = 1 << 26


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

    def joined(self, other: Form) -> Form:
        """The sum of two uses of one parameter, before anything is squared."""
        return Dense(self.dense() + other.dense())

    def squares(self) -> Tensor:
        """``shape``: sum over columns and examples of the squared gradient."""
        return reduce(torch.add, (_square_sum(part.dense()).sum(0) for part in self.pieces()))

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
        parts = [_lengths(_flat(part.dense()), 2) for part in self.pieces()]
        return grouped(torch.cat(parts, 1), groups)

    def project(self, direction: Tensor) -> Tensor:
        """``(columns, examples)``: inner products of the gradients with one direction."""
        flat = direction.reshape(-1)
        return torch.cat([_flat(part.dense()) @ flat for part in self.pieces()], 1)

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


def _square_sum(factor: Tensor) -> Tensor:
    """Sum of squares over the columns, without the array of squares."""
    total = factor[0].square()
    for column in factor[1:]:
        total.addcmul_(column, column)
    return total


def _lengths(vectors: Tensor, axes: int | tuple[int, ...]) -> Tensor:
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

    def sizes(self) -> tuple[int, int]:
        return 0, self._per_column(self.values)

    @property
    def device(self) -> torch.device:
        return self.values.device


class Outer(Form):
    """A sum over positions of outer products: what a matrix multiplication or a convolution leaves.

    For group ``c`` the gradient is ``sum_t left[k, n, c, t, :] right[k, n, c, t, :]'``, reshaped to the parameter. One
    of the two factors does not depend on the column and has size 1 there.

    Args:
        left: ``(columns or 1, examples, groups, positions, rows)``.
        right: ``(columns or 1, examples, groups, positions, entries)``.
        shape: of the parameter; ``groups * rows * entries`` elements.
        order: how the groups, rows and the entries (in ``inner`` shape) are permuted into the parameter.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        shape: torch.Size,
        inner: tuple[int, ...] | None = None,
        order: tuple[int, ...] | None = None,
    ) -> None:
        self.left, self.right, self.shape, self.inner, self.order = left, right, shape, inner, order
        self.columns = max(left.shape[0], right.shape[0])
        self.examples = left.shape[1]
        self.groups, self.positions, self.rows, self.entries = *left.shape[2:], right.shape[4]

    @property
    def device(self) -> torch.device:
        return self.left.device

    def arranged(self, core: Tensor, leading: int) -> Tensor:
        """``(..., groups, rows, entries)`` to ``(..., *shape)``."""
        head = core.shape[:leading]
        if self.inner is not None and self.order is not None:
            core = core.reshape(*head, self.groups, self.rows, *self.inner)
            core = core.permute(*range(leading), *(leading + axis for axis in self.order))
        return core.reshape(*head, *self.shape)

    def dense(self) -> Tensor:
        return self.arranged(self.left.mT @ self.right, 2)

    def select(self, examples: slice) -> Outer:
        return self._with(self.left[:, examples], self.right[:, examples])

    def sizes(self) -> tuple[int, int]:
        left, right = self._per_column(self.left), self._per_column(self.right)
        # Which of the two changes with the column cannot be told from a single one.
        return max(left, right), min(left, right) if self.columns == 1 else max(left, right)

    def _with(self, left: Tensor, right: Tensor) -> Outer:
        return Outer(left, right, self.shape, self.inner, self.order)

    def joined(self, other: Form) -> Form:
        # Two calls of one layer are one call with the positions of both.
        if (
            isinstance(other, Outer)
            and (other.shape, other.inner, other.order) == (self.shape, self.inner, self.order)
            and other.left.shape[0] == self.left.shape[0]
            and other.right.shape[0] == self.right.shape[0]
        ):
            return self._with(torch.cat([self.left, other.left], 3), torch.cat([self.right, other.right], 3))
        return super().joined(other)

    def squares(self) -> Tensor:
        if self.positions == 1:
            # (g a')^2 = g^2 (a^2)': one product for all columns and examples.
            left, right = _square_sum(self.left), _square_sum(self.right)
            return self.arranged(torch.einsum("ncto,ncti->coi", left, right), 0)
        return self.arranged(self._summed_products(), 0)

    def spread(self, layout: Layout) -> Tensor:
        if self.positions == 1:
            varying, still = (self.left, self.right) if self.right.shape[0] == 1 else (self.right, self.left)
            per_draw = torch.stack([varying[group].square().sum(0) for group in layout.groups()])
            # An example's variance is itself an outer product.
            factors = variance_of_mean(per_draw), still[0].square().square()
            left, right = factors if self.right.shape[0] == 1 else factors[::-1]
            moments = [
                torch.einsum("ncto,ncti->coi", *pair) for pair in ((left, right), (left.square(), right.square()))
            ]
            return self.arranged(torch.stack(moments), 1)
        return super().spread(layout)

    def _summed_products(self) -> Tensor:
        """``(groups, rows, entries)``: squared gradients, a few examples at a time through one buffer."""
        left, right = self._stacked()
        left, right = left.flatten(0, 1), right.flatten(0, 1)  # examples and groups
        step = self.groups * piece(self.columns * self.groups * self.rows * self.entries, self.device)
        step = min(step, len(left))
        buffer = array("product", (step, left.shape[2], right.shape[2]), left)
        total = array("squares", buffer.shape, left).zero_()
        for start in range(0, len(left), step):
            count = min(step, len(left) - start)
            product = torch.bmm(left[start : start + count].mT, right[start : start + count], out=buffer[:count])
            total[:count].addcmul_(product, product)
        return self._without_columns(total.unflatten(0, (-1, self.groups)).sum(0))

    def _stacked(self) -> tuple[Tensor, Tensor]:
        """Columns laid beside the rows (or entries) they belong to: one large product per example and group."""

        def beside(factor: Tensor, use: str) -> Tensor:
            if factor.shape[0] == 1:
                return factor[0]
            # Copied in the order it lies in memory, and turned afterwards: the products take either.
            turned = factor.stride(3) < factor.stride(4)
            order = (1, 2, 0, 4, 3) if turned else (1, 2, 3, 0, 4)
            moved = factor.permute(order)
            copy = array(use, moved.shape, factor).copy_(moved)
            return copy.flatten(2, 3).mT if turned else copy.flatten(3, 4)

        return beside(self.left, "left"), beside(self.right, "right")

    def _without_columns(self, product: Tensor) -> Tensor:
        """Columns beside rows (or entries), summed."""
        axis, size = (1, self.rows) if self.right.shape[0] == 1 else (2, self.entries)
        parted: Tensor = product.unflatten(axis, (-1, size))
        return parted.sum(axis)

    def norms(self, groups: Sequence[slice]) -> Tensor:
        if self.positions == 1:
            return grouped((_lengths(self.left, (3, 4)) * _lengths(self.right, (3, 4))).sum(2), groups)
        width = self.columns * self.rows if self.right.shape[0] == 1 else self.columns * self.entries
        still = self.entries if self.right.shape[0] == 1 else self.rows
        # |sum_t g_t a_t'|^2 = sum_tt' (g_t . g_t') (a_t . a_t'): cheaper when there are few positions.
        if len(groups) == 1 and self.positions * (width + still) < width * still:
            return self._norms_by_position(groups[0])
        left, right = self._stacked()
        step = min(self.examples, piece(self.columns * self.groups * self.rows * self.entries, self.device))
        shape = (step * self.groups, left.shape[3], right.shape[3])
        parts = []
        for start in range(0, self.examples, step):
            here = slice(start, start + step)
            one, two = left[here].flatten(0, 1), right[here].flatten(0, 1)
            product = torch.bmm(one.mT, two, out=array("product", (len(one), *shape[1:]), left))
            if self.right.shape[0] == 1:
                lengths = _lengths(product.unflatten(1, (-1, self.rows)), (2, 3))
            else:
                lengths = _lengths(product.unflatten(2, (-1, self.entries)), (1, 3))
            parts.append(lengths.unflatten(0, (-1, self.groups)).sum(1))
        return grouped(torch.cat(parts).T, groups)

    def _norms_by_position(self, group: slice) -> Tensor:
        whole = self._with(
            self.left[group] if self.left.shape[0] > 1 else self.left,
            self.right[group] if self.right.shape[0] > 1 else self.right,
        )
        left, right = whole._stacked()
        step = piece(self.groups * self.positions * self.positions, self.device)
        parts = []
        for start in range(0, self.examples, step):
            here = slice(start, start + step)
            inner = (left[here] @ left[here].mT).mul_(right[here] @ right[here].mT)
            parts.append(inner.sum((1, 2, 3)))
        return torch.cat(parts).unsqueeze(0)

    def project(self, direction: Tensor) -> Tensor:
        core = direction
        if self.inner is not None and self.order is not None:
            core = core.reshape([(self.groups, self.rows, *self.inner)[axis] for axis in self.order])
            core = core.permute([self.order.index(axis) for axis in range(len(self.order))])
        core = core.reshape(self.groups, self.rows, self.entries)
        return ((self.left @ core) * self.right).sum((2, 3, 4))


class Rows(Form):
    """Gradients that touch few rows of a table: an embedding.

    Args:
        index: ``(examples, positions)``, which row each position read.
        values: ``(columns, examples, positions, width)``, the gradient at what it read.
    """

    def __init__(self, index: Tensor, values: Tensor, shape: torch.Size) -> None:
        self.index, self.values, self.shape = index, values, shape
        self.columns, self.examples = values.shape[:2]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dense(self) -> Tensor:
        table = self.values.new_zeros(self.columns, self.examples, *self.shape)
        index = self.index[None, :, :, None].expand_as(self.values)
        return table.scatter_add_(2, index, self.values)

    def select(self, examples: slice) -> Rows:
        return Rows(self.index[examples], self.values[:, examples], self.shape)

    def sizes(self) -> tuple[int, int]:
        return self.index.numel() * 8 // self.examples, self._per_column(self.values)

    def joined(self, other: Form) -> Form:
        if isinstance(other, Rows):
            index = torch.cat([self.index, other.index], 1)
            return Rows(index, torch.cat([self.values, other.values], 2), self.shape)
        return super().joined(other)

    def _merged(self) -> tuple[Tensor, Tensor]:
        """One row per (example, table row) that occurs: ``(pairs,)`` keys and ``(columns, pairs, width)`` gradients."""
        height = self.shape[0]
        key = self.index + torch.arange(self.examples, device=self.device)[:, None] * height
        pairs, where = torch.unique(key, return_inverse=True)
        merged = self.values.new_zeros(self.columns, len(pairs), self.shape[1])
        return pairs, merged.index_add_(1, where.reshape(-1), self.values.flatten(1, 2))

    def squares(self) -> Tensor:
        pairs, merged = self._merged()
        return self._placed(pairs, merged.square().sum(0))

    def spread(self, layout: Layout) -> Tensor:
        pairs, merged = self._merged()
        variance = variance_of_mean(torch.stack([merged[group].square().sum(0) for group in layout.groups()]))
        return torch.stack([self._placed(pairs, variance), self._placed(pairs, variance.square())])

    def _placed(self, pairs: Tensor, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.shape).index_add_(0, pairs % self.shape[0], rows)

    def norms(self, groups: Sequence[slice]) -> Tensor:
        pairs, merged = self._merged()
        lengths = merged.square().sum(2)
        per_example = lengths.new_zeros(self.columns, self.examples)
        return grouped(per_example.index_add_(1, pairs // self.shape[0], lengths), groups)

    def project(self, direction: Tensor) -> Tensor:
        return (self.values * direction[self.index]).sum((2, 3))
