"""Gradients that are nonzero in few rows of a table: those of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saltflat.gradients.base import ColumnLayout, FactoredGradient, MatrixGeometry, sum_groups
from saltflat.results.jackknife import compute_variance_of_mean


class RowSparseGradient(FactoredGradient):
    """Gradients that are nonzero in few rows of a table, as of embeddings.

    Args:
        index: ``(examples, positions)``, the row that each position reads.
        values: ``(columns, examples, positions, width)``, the gradients at these rows.
        shape: of the table.
    """

    def __init__(self, index: Tensor, values: Tensor, shape: torch.Size) -> None:
        self.index, self.values, self.shape = index, values, shape
        self.columns, self.examples = values.shape[:2]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to_dense(self) -> Tensor:
        table = self.values.new_zeros(self.columns, self.examples, *self.shape)
        index = self.index[None, :, :, None].expand_as(self.values)
        return table.scatter_add_(2, index, self.values)

    def select_examples(self, examples: slice) -> RowSparseGradient:
        return RowSparseGradient(self.index[examples], self.values[:, examples], self.shape)

    def select_columns(self, columns: slice) -> RowSparseGradient:
        return RowSparseGradient(self.index, self.values[columns], self.shape)

    def count_bytes(self) -> tuple[int, int]:
        return self.index.numel() * 8 // self.examples, self._count_column_bytes(self.values)

    def add(self, other: FactoredGradient) -> FactoredGradient:
        if isinstance(other, RowSparseGradient):
            index = torch.cat([self.index, other.index], 1)
            return RowSparseGradient(index, torch.cat([self.values, other.values], 2), self.shape)
        return super().add(other)

    def _merge_rows(self) -> tuple[Tensor, Tensor]:
        """Sum the gradients of each (example, row) pair: keys ``(pairs,)`` and values ``(columns, pairs, width)``."""
        height = self.shape[0]
        key = self.index + torch.arange(self.examples, device=self.device)[:, None] * height
        pairs, where = torch.unique(key, return_inverse=True)
        merged = self.values.new_zeros(self.columns, len(pairs), self.shape[1])
        return pairs, merged.index_add_(1, where.reshape(-1), self.values.flatten(1, 2))

    def sum_squares(self) -> Tensor:
        pairs, merged = self._merge_rows()
        return self._scatter_rows(pairs, merged.square().sum(0))

    def compute_spread(self, layout: ColumnLayout) -> Tensor:
        pairs, merged = self._merge_rows()
        variance = compute_variance_of_mean(
            torch.stack([merged[group].square().sum(0) for group in layout.make_group_slices()])
        )
        return torch.stack([self._scatter_rows(pairs, variance), self._scatter_rows(pairs, variance.square())])

    def _scatter_rows(self, pairs: Tensor, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.shape).index_add_(0, pairs % self.shape[0], rows)

    def compute_squared_norms(self, groups: Sequence[slice]) -> Tensor:
        pairs, merged = self._merge_rows()
        lengths = merged.square().sum(2)
        per_example = lengths.new_zeros(self.columns, self.examples)
        return sum_groups(per_example.index_add_(1, pairs // self.shape[0], lengths), groups)

    def project(self, direction: Tensor) -> Tensor:
        return (self.values * direction[self.index]).sum((2, 3))

    def sum_weighted(self, coefficients: Tensor) -> Tensor:
        rows = torch.einsum("kn,kntw->ntw", coefficients, self.values)
        return rows.new_zeros(self.shape).index_add_(0, self.index.reshape(-1), rows.flatten(0, 1))

    def sum_unit_squares(self, direction: Tensor, unit: Tensor, units: int) -> Tensor:
        if units != self.shape[0] or not bool((unit == unit[:, :1]).all()):
            # Units are the columns of the table: few numbers for each example.
            return (self.values * direction[self.index]).sum(2).square().sum((0, 1))
        pairs, merged = self._merge_rows()
        row = pairs % self.shape[0]
        inner = (merged * direction[row]).sum(2).square().sum(0)
        return inner.new_zeros(units).index_add_(0, row, inner)

    def compute_row_products(self, geometry: MatrixGeometry, scale: Tensor | None) -> Tensor:
        if scale is not None or not geometry.inputs_first:
            return super().compute_row_products(geometry, scale)
        _, merged = self._merge_rows()
        flat = merged.flatten(0, 1)
        return (flat.mT @ flat).unsqueeze(0)

    def compute_gram(self, other: FactoredGradient) -> Tensor:
        if not isinstance(other, RowSparseGradient):
            return super().compute_gram(other)
        same = self.index.reshape(-1, 1) == other.index.reshape(1, -1)
        inner = (self.values.flatten(0, 2) @ other.values.flatten(0, 2).mT) * same
        return inner.reshape(*self.index.shape, *other.index.shape).sum((1, 3))
