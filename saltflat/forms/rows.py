"""Gradients that touch few rows of a table: an embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saltflat.errorbars import variance_of_mean
from saltflat.forms.base import Form, Geometry, Layout, grouped


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

    def part(self, columns: slice) -> Rows:
        return Rows(self.index, self.values[columns], self.shape)

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

    def expand(self, coefficients: Tensor) -> Tensor:
        rows = torch.einsum("kn,kntw->ntw", coefficients, self.values)
        return rows.new_zeros(self.shape).index_add_(0, self.index.reshape(-1), rows.flatten(0, 1))

    def unit_squares(self, direction: Tensor, unit: Tensor, units: int) -> Tensor:
        if units != self.shape[0] or not bool((unit == unit[:, :1]).all()):
            # Units that run along the rows: few numbers for each example.
            return (self.values * direction[self.index]).sum(2).square().sum((0, 1))
        pairs, merged = self._merged()
        row = pairs % self.shape[0]
        inner = (merged * direction[row]).sum(2).square().sum(0)
        return inner.new_zeros(units).index_add_(0, row, inner)

    def row_products(self, geometry: Geometry, scale: Tensor | None) -> Tensor:
        if scale is not None or not geometry.inputs_first:
            return super().row_products(geometry, scale)
        _, merged = self._merged()
        flat = merged.flatten(0, 1)
        return (flat.mT @ flat).unsqueeze(0)

    def gram(self, other: Form) -> Tensor:
        if not isinstance(other, Rows):
            return super().gram(other)
        same = self.index.reshape(-1, 1) == other.index.reshape(1, -1)
        inner = (self.values.flatten(0, 2) @ other.values.flatten(0, 2).mT) * same
        return inner.reshape(*self.index.shape, *other.index.shape).sum((1, 3))
