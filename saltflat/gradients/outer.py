"""Gradients that are sums of outer products: those of matrix multiplications and convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from saltflat.gradients.base import (
    MAX_PAIRS,
    ColumnLayout,
    FactoredGradient,
    MatrixGeometry,
    compute_piece_size,
    compute_squared_lengths,
    get_scratch_array,
    sum_column_squares,
    sum_groups,
)
from saltflat.results.jackknife import compute_variance_of_mean

# Elements of gradients that several statistics share, instead of computing them again: those of a few megabytes stay in
# the caches of a CPU.
KEPT_CPU = 1 << 20
KEPT_GPU = 1 << 24
# Whether arrays of a parameter's shape are constant along the rows of their groups; see `_is_constant_along_rows`.
_CONSTANT: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class OuterProductGradient(FactoredGradient):
    """Gradients that are sums over positions of outer products, as of matrix multiplications and convolutions.

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

    def reshape_to_parameter(self, core: Tensor, leading: int) -> Tensor:
        """Reshape ``(..., groups, rows, entries)`` to ``(..., *shape)``."""
        head = core.shape[:leading]
        if self.inner is not None and self.order is not None:
            core = core.reshape(*head, self.groups, self.rows, *self.inner)
            core = core.permute(*range(leading), *(leading + axis for axis in self.order))
        return core.reshape(*head, *self.shape)

    def to_dense(self) -> Tensor:
        return self.reshape_to_parameter(self.left.mT @ self.right, 2)

    def select_examples(self, examples: slice) -> OuterProductGradient:
        return self._replace_factors(self.left[:, examples], self.right[:, examples])

    def select_columns(self, columns: slice) -> OuterProductGradient:
        left, right = (factor[columns] if factor.shape[0] > 1 else factor for factor in (self.left, self.right))
        return self._replace_factors(left, right)

    def count_bytes(self) -> tuple[int, int]:
        left, right = self._count_column_bytes(self.left), self._count_column_bytes(self.right)
        # With a single column it is unknown which of the two depends on the column.
        return max(left, right), min(left, right) if self.columns == 1 else max(left, right)

    def _replace_factors(self, left: Tensor, right: Tensor) -> OuterProductGradient:
        return OuterProductGradient(left, right, self.shape, self.inner, self.order)

    def add(self, other: FactoredGradient) -> FactoredGradient:
        # Two calls of one layer are equivalent to one call with the positions of both.
        if (
            isinstance(other, OuterProductGradient)
            and (other.shape, other.inner, other.order) == (self.shape, self.inner, self.order)
            and other.left.shape[0] == self.left.shape[0]
            and other.right.shape[0] == self.right.shape[0]
        ):
            return self._replace_factors(torch.cat([self.left, other.left], 3), torch.cat([self.right, other.right], 3))
        return super().add(other)

    def sum_squares(self) -> Tensor:
        if self.positions == 1:
            # (g a')^2 = g^2 (a^2)': one product for all columns and examples.
            left, right = sum_column_squares(self.left), sum_column_squares(self.right)
            return self.reshape_to_parameter(torch.einsum("ncto,ncti->coi", left, right), 0)
        return self.reshape_to_parameter(self._sum_squared_products(), 0)

    def compute_spread(self, layout: ColumnLayout) -> Tensor:
        if self.positions == 1:
            varying, still = (self.left, self.right) if self.right.shape[0] == 1 else (self.right, self.left)
            per_draw = torch.stack([varying[group].square().sum(0) for group in layout.make_group_slices()])
            # The variance of an example is itself an outer product.
            factors = compute_variance_of_mean(per_draw), still[0].square().square()
            left, right = factors if self.right.shape[0] == 1 else factors[::-1]
            moments = [
                torch.einsum("ncto,ncti->coi", *pair) for pair in ((left, right), (left.square(), right.square()))
            ]
            return self.reshape_to_parameter(torch.stack(moments), 1)
        return super().compute_spread(layout)

    def _sum_squared_products(self) -> Tensor:
        """Return the sum of squared gradients, ``(groups, rows, entries)``."""
        if self._product is not None:
            return self._product.square().sum((0, 2))
        total = None
        for product in self._iterate_products():
            if total is None:
                total = get_scratch_array("squares", product.shape, product).zero_()
            total[: len(product)].addcmul_(product, product)
        assert total is not None
        return total.sum((0, 2))

    @cached_property
    def _product(self) -> Tensor | None:
        """The gradients, ``(examples, groups, columns, rows, entries)``, if they are few; several statistics use them.

        Arrays of the parameter's size are small beside the factors where a parameter has many positions.
        """
        size = self.examples * self.columns * self.groups * self.rows * self.entries
        if size > (KEPT_CPU if self.device.type == "cpu" else KEPT_GPU):
            return None
        left, right = (factor.flatten(0, 1) for factor in self._stack_columns())
        return self._separate_columns(torch.bmm(left.mT, right))

    def _iterate_products(self) -> Iterator[Tensor]:
        """Yield the gradients of some examples at a time, as :attr:`_product`; the next ones share their memory."""
        if self._product is not None:
            yield self._product
            return
        left, right = self._stack_columns()
        step = min(
            self.examples, compute_piece_size(self.columns * self.groups * self.rows * self.entries, self.device)
        )
        for start in range(0, self.examples, step):
            one, two = (factor[start : start + step].flatten(0, 1) for factor in (left, right))
            buffer = get_scratch_array("product", (len(one), one.shape[2], two.shape[2]), left)
            yield self._separate_columns(torch.bmm(one.mT, two, out=buffer))

    def _separate_columns(self, product: Tensor) -> Tensor:
        """Give the columns an axis of their own: ``(examples, groups, columns, rows, entries)``."""
        lead = len(product) // self.groups, self.groups
        if self.right.shape[0] == 1:
            return product.view(*lead, self.columns, self.rows, self.entries)
        return product.view(*lead, self.rows, self.columns, self.entries).transpose(2, 3)

    def _stack_columns(self) -> tuple[Tensor, Tensor]:
        """Return both factors with columns beside their rows (or entries), for one product per example and group."""

        def stack_factor(factor: Tensor, use: str) -> Tensor:
            if factor.shape[0] == 1:
                return factor[0]
            # Copied in memory order and transposed afterwards: the products accept either.
            turned = factor.stride(3) < factor.stride(4)
            order = (1, 2, 0, 4, 3) if turned else (1, 2, 3, 0, 4)
            moved = factor.permute(order)
            copy = get_scratch_array(use, moved.shape, factor).copy_(moved)
            return copy.flatten(2, 3).mT if turned else copy.flatten(3, 4)

        return stack_factor(self.left, "left"), stack_factor(self.right, "right")

    def compute_squared_norms(self, groups: Sequence[slice]) -> Tensor:
        if self.positions == 1:
            return sum_groups(
                (compute_squared_lengths(self.left, (3, 4)) * compute_squared_lengths(self.right, (3, 4))).sum(2),
                groups,
            )
        if self._has_few_positions(groups):
            return self._compute_norms_by_position(groups[0])
        parts = [compute_squared_lengths(product, (1, 3, 4)) for product in self._iterate_products()]
        return sum_groups(torch.cat(parts).T, groups)

    def _has_single_right(self) -> bool:
        """Return whether it is the left factor that depends on the column."""
        return self.right.shape[0] == 1

    def _has_few_positions(self, groups: Sequence[slice]) -> bool:
        """Return whether norms are computed fastest from the inner products between positions."""
        still, moving = (self.entries, self.rows) if self._has_single_right() else (self.rows, self.entries)
        width = self.columns * moving
        # |sum_t g_t a_t'|^2 = sum_tt' (g_t . g_t') (a_t . a_t'): cheaper when there are few positions.
        few = self.positions * (width + still) < width * still
        return len(groups) == 1 and few and vars(self).get("_product") is None

    def _compute_norms_by_position(self, group: slice) -> Tensor:
        whole = self._replace_factors(
            self.left[group] if self.left.shape[0] > 1 else self.left,
            self.right[group] if self.right.shape[0] > 1 else self.right,
        )
        left, right = whole._stack_columns()
        step = compute_piece_size(self.groups * self.positions * self.positions, self.device)
        parts = []
        for start in range(0, self.examples, step):
            here = slice(start, start + step)
            inner = (left[here] @ left[here].mT).mul_(right[here] @ right[here].mT)
            parts.append(inner.sum((1, 2, 3)))
        return torch.cat(parts).unsqueeze(0)

    def reshape_to_core(self, direction: Tensor) -> Tensor:
        """Reshape an array of the parameter's shape to ``(groups, rows, entries)``.

        This is the inverse of :meth:`reshape_to_parameter`.
        """
        core = direction
        if self.inner is not None and self.order is not None:
            core = core.reshape([(self.groups, self.rows, *self.inner)[axis] for axis in self.order])
            core = core.permute([self.order.index(axis) for axis in range(len(self.order))])
        return core.reshape(self.groups, self.rows, self.entries)

    def _is_constant_along_rows(self, values: Tensor) -> bool:
        """Return whether all rows of a group have the same values; remembered, since a GPU has to be waited for."""
        about = values._version, self.groups, self.rows, self.order
        known: tuple[tuple[object, ...], bool] | None = _CONSTANT.get(values)
        if known is None or known[0] != about:
            core = self.reshape_to_core(values)
            known = _CONSTANT[values] = about, bool((core == core[:, :1]).all())
        return known[1]

    def project(self, direction: Tensor) -> Tensor:
        core = self.reshape_to_core(direction)
        # The factor without columns is multiplied first: one product for all columns.
        if self.right.shape[0] == 1:
            return torch.einsum("knctr,nctr->kn", self.left, self.right[0] @ core.mT)
        return torch.einsum("kncte,ncte->kn", self.right, self.left[0] @ core)

    def sum_weighted(self, coefficients: Tensor) -> Tensor:
        # The sum over columns is computed before the product.
        if self.right.shape[0] == 1:
            left, right = torch.einsum("kn,knctr->nctr", coefficients.to(self.left), self.left), self.right[0]
        else:
            left, right = self.left[0], torch.einsum("kn,kncte->ncte", coefficients.to(self.right), self.right)
        rows, entries = left.permute(1, 3, 0, 2).flatten(2), right.permute(1, 0, 2, 3).flatten(1, 2)
        return self.reshape_to_parameter(rows @ entries, 0)

    def sum_unit_squares(self, direction: Tensor, unit: Tensor, units: int) -> Tensor:
        core, number = self.reshape_to_core(direction), self.reshape_to_core(unit)
        by_entry = self._is_constant_along_rows(unit)
        if not by_entry and not bool((number == number[:, :, :1]).all()):
            return super().sum_unit_squares(direction, unit, units)
        number = (number[:, 0] if by_entry else number[:, :, 0]).reshape(-1)
        total = core.new_zeros(units)
        for inner in self._iterate_unit_products(core, by_entry):
            flat = inner.flatten(0, 1).flatten(1)
            total += flat.new_zeros(len(flat), units).index_add_(1, number, flat).square().sum(0)
        return total

    def _iterate_unit_products(self, core: Tensor, by_entry: bool) -> Iterator[Tensor]:
        """Yield the direction times the gradients, summed over the rows (or the entries) of each group.

        The order of axes is columns and examples, or examples and columns, then groups and entries (or rows).
        """
        if self.positions > (self.rows if by_entry else self.entries) and self.right.shape[0] == 1:
            for product in self._iterate_products():
                yield torch.einsum("nckre,cre->nkce" if by_entry else "nckre,cre->nkcr", product, core)
            return
        width = self.groups * self.positions * (self.entries if by_entry else self.rows)
        step = compute_piece_size(self.columns * width, self.device)
        for start in range(0, self.examples, step):
            part = self.select_examples(slice(start, start + step))
            # The direction times the other factor, times this factor at each entry (or row).
            each = (part.left @ core) * part.right if by_entry else (part.right @ core.mT) * part.left
            yield each.sum(3)

    def compute_row_products(self, geometry: MatrixGeometry, scale: Tensor | None) -> Tensor:
        factors = None if scale is None else self.reshape_to_core(scale)
        if geometry.inputs_first or geometry.groups != self.groups:
            return super().compute_row_products(geometry, scale)
        plain = self.positions == 1 and self.right.shape[0] == 1
        if plain and (factors is None or scale is None or self._is_constant_along_rows(scale)):
            right = self.right[0] if factors is None else self.right[0] * factors[:, :1]
            # (g a')(g a')' = |a|^2 g g'
            left = (
                (self.left * compute_squared_lengths(right, (2, 3))[None, :, :, None, None].sqrt())
                .permute(2, 4, 0, 1, 3)
                .flatten(2)
            )
            return left @ left.mT
        total = None
        for product in self._iterate_products():
            scaled = product if factors is None else product * factors[:, None]
            wide = scaled.transpose(2, 3).flatten(3)  # (examples, groups, rows, columns and entries)
            found = (wide @ wide.mT).sum(0)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def sum_map_squares(self, direction: Tensor, geometry: MatrixGeometry, scale: Tensor | None) -> Tensor:
        W, core = geometry.view_as_matrices(direction).flatten(2), self.reshape_to_core(direction)
        factors = None if scale is None else self.reshape_to_core(scale)
        turned = not _is_same_view(W, core)
        is_pair = W.shape[1] ** 2 <= MAX_PAIRS or W.shape[1] <= W.shape[2]
        if is_pair or (turned and not _is_same_view(W, core.mT)):
            return super().sum_map_squares(direction, geometry, scale)
        # The factors of the outputs, times the weights, and those of the inputs, with one scale for each input.
        out, into = (self.right, self.left) if turned else (self.left, self.right)
        if factors is not None:
            by_input = factors.mT if turned else factors
            if not bool((by_input == by_input[:, :1]).all()):
                return super().sum_map_squares(direction, geometry, scale)
            into = into * by_input[:, :1]
        shape = torch.Size((self.groups * W.shape[2], W.shape[2]))
        return OuterProductGradient(out @ W, into, shape).compute_squared_norms([slice(None)]).sum()

    def compute_gram(self, other: FactoredGradient) -> Tensor:
        if not isinstance(other, OuterProductGradient) or self.positions * other.positions > 1:
            return super().compute_gram(other)
        # <g a', h b'> = (g.h)(a.b)
        left = torch.einsum("ncr,mcr->cnm", self.left[0, :, :, 0], other.left[0, :, :, 0])
        right = torch.einsum("nce,mce->cnm", self.right[0, :, :, 0], other.right[0, :, :, 0])
        return (left * right).sum(0)


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.data_ptr()) == (other.shape, other.stride(), other.data_ptr())
