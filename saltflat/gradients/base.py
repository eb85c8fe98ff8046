"""The base class of factored per-example gradients, dense gradients, and working memory."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, reduce
from mmap import PAGESIZE
from typing import Protocol

import torch
from torch import Tensor
from torch._C import _functorch
from torch.func import vmap

from saltflat.results.jackknife import compute_variance_of_mean

# Intermediate products are computed in pieces of about this many elements. On a CPU they then stay in the second-level
# cache, which makes convolutions twice as fast; on a GPU this only bounds memory.
CPU_PIECE = 1 << 18
GPU_PIECE = 1 << 26
# Matrices of all pairs of outputs with more entries than this are not made where there are fewer inputs.
MAX_PAIRS = 1 << 20


class MatrixGeometry(Protocol):
    """How an array of the parameter's shape is a stack of matrices; see :class:`saltflat.layers.Geometry`."""

    @property
    def groups(self) -> int:
        """Return the number of groups of channels that are not connected with each other."""

    @property
    def inputs_first(self) -> bool:
        """Return whether the first axis counts inputs."""

    def view_as_matrices(self, values: Tensor) -> Tensor:
        """Return an array of the parameter's shape as ``(groups, out, in, positions)``."""


@dataclass(frozen=True)
class ColumnLayout:
    """How the columns are arranged: ``fixed`` ones first, then ``draws`` groups of ``size`` random ones."""

    fixed: int
    draws: int = 0
    size: int = 0

    @property
    def total(self) -> int:
        """Return the number of columns."""
        return self.fixed + self.draws * self.size

    def make_group_slices(self) -> list[slice]:
        """Return the slice of columns of each draw."""
        start = self.fixed
        return [slice(start + d * self.size, start + (d + 1) * self.size) for d in range(self.draws)]


class FactoredGradient(ABC):
    """Gradients of one parameter for several columns and examples.

    Attributes:
        shape: of the parameter.
        columns: number of columns.
        examples: number of examples.
    """

    shape: torch.Size
    columns: int
    examples: int

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the gradients as an array, ``(columns, examples, *shape)``: the definition."""

    @abstractmethod
    def select_examples(self, examples: slice) -> FactoredGradient:
        """Return the gradients of some of the examples."""

    @abstractmethod
    def select_columns(self, columns: slice) -> FactoredGradient:
        """Return the gradients of some of the columns."""

    def add(self, other: FactoredGradient) -> FactoredGradient:
        """Return the sum of the gradients of two uses of one parameter."""
        return DenseGradient(self.to_dense() + other.to_dense())

    def sum_squares(self) -> Tensor:
        """Return the sum over columns and examples of the squared gradient, ``shape``."""
        return reduce(torch.add, (sum_column_squares(part.to_dense()).sum(0) for part in self.split_examples()))

    def compute_spread(self, layout: ColumnLayout) -> Tensor:
        """Return the scatter of :meth:`sum_squares` due to random columns, ``(2, *shape)``.

        These are the sums over examples of the variances, and of their squares.
        """

        def compute_part(part: FactoredGradient) -> Tensor:
            square = part.to_dense().square()
            variance = compute_variance_of_mean(
                torch.stack([square[group].sum(0) for group in layout.make_group_slices()])
            )
            return torch.stack([variance.sum(0), variance.square().sum(0)])

        return reduce(torch.add, (compute_part(part) for part in self.split_examples()))

    def compute_squared_norms(self, groups: Sequence[slice]) -> Tensor:
        """Return the squared norm of the gradient, summed over each group of columns, ``(groups, examples)``."""
        parts = [compute_squared_lengths(_flatten_gradients(part.to_dense()), 2) for part in self.split_examples()]
        return sum_groups(torch.cat(parts, 1), groups)

    def project(self, direction: Tensor) -> Tensor:
        """Return the inner products of the gradients with one direction, ``(columns, examples)``."""
        flat = direction.reshape(-1)
        return torch.cat([_flatten_gradients(part.to_dense()) @ flat for part in self.split_examples()], 1)

    def sum_weighted(self, coefficients: Tensor) -> Tensor:
        """Return the sum over columns and examples of coefficient times gradient, ``shape``."""
        parts, start = [], 0
        for part in self.split_examples():
            weights = coefficients[:, start : start + part.examples]
            parts.append(torch.tensordot(weights, part.to_dense(), 2))
            start += part.examples
        total: Tensor = reduce(torch.add, parts)
        return total

    def sum_unit_squares(self, direction: Tensor, unit: Tensor, units: int) -> Tensor:
        """Return the squared inner products with a direction for each unit, summed over columns and examples.

        ``unit`` has the parameter's shape and contains the unit of each entry. The result is ``(units,)``.
        """
        weight, unit, total = direction.reshape(-1), unit.reshape(-1), direction.new_zeros(units)
        for part in self.split_examples():
            products = (_flatten_gradients(part.to_dense()) * weight).flatten(0, 1)
            inner = products.new_zeros(len(products), units).index_add_(1, unit, products)
            total += inner.square().sum(0)
        return total

    def compute_row_products(self, geometry: MatrixGeometry, scale: Tensor | None) -> Tensor:
        """Return the inner products between the gradients of output units, over columns and examples.

        ``scale`` has the parameter's shape and multiplies the gradients first. The result is ``(groups, out, out)``.
        """
        total = None
        for part in self.split_examples():
            dense = part.to_dense().flatten(0, 1)
            dense = dense if scale is None else dense * scale
            rows = vmap(geometry.view_as_matrices)(dense).flatten(3)  # (b, groups, out, in)
            wide = rows.permute(1, 2, 0, 3).flatten(2)
            total = wide @ wide.mT if total is None else total.add_(wide @ wide.mT)
        assert total is not None
        return total

    def sum_map_squares(self, direction: Tensor, geometry: MatrixGeometry, scale: Tensor | None) -> Tensor:
        """Return the squared entries of ``W' G``, summed over columns and examples.

        W is the direction and G a gradient, both as matrices from inputs to outputs. The entries are the derivatives
        along W E, where E maps one input to another: linear maps of the inputs, before the weights are applied.
        ``scale`` has the parameter's shape and multiplies the gradients first.
        """
        W = geometry.view_as_matrices(direction).flatten(2)  # (groups, out, in)
        if W.shape[1] ** 2 <= MAX_PAIRS or W.shape[1] <= W.shape[2]:
            # |W' G|^2 = sum_st (W W')_st (G G')_st
            W = W.double()
            return (self.compute_row_products(geometry, scale).double() * (W @ W.mT)).sum()

        def compute_part(part: FactoredGradient) -> Tensor:
            dense = part.to_dense().flatten(0, 1)
            rows = vmap(geometry.view_as_matrices)(dense if scale is None else dense * scale).flatten(3)
            return (W.mT @ rows).square().sum()

        return reduce(torch.add, (compute_part(part) for part in self.split_examples()))

    def compute_gram(self, other: FactoredGradient) -> Tensor:
        """Return the inner products with other examples' gradients, one column, ``(examples, other examples)``."""
        return _flatten_gradients(self.to_dense())[0] @ _flatten_gradients(other.to_dense())[0].mT

    def split_examples(self) -> Iterator[FactoredGradient]:
        """Yield the gradients in slices of examples whose dense gradients have a bounded size."""
        step = compute_piece_size(self.columns * max(1, self.shape.numel()), self.device)
        for start in range(0, self.examples, step):
            yield self.select_examples(slice(start, start + step))

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device of the gradients."""

    @abstractmethod
    def count_bytes(self) -> tuple[int, int]:
        """Return the bytes held for one example: those that do not depend on the column, and those of one column."""

    def _count_column_bytes(self, factor: Tensor) -> int:
        return factor.numel() * factor.element_size() // (self.examples * factor.shape[0])


def compute_piece_size(elements: int, device: torch.device) -> int:
    """Return how many examples of this many elements each are processed at once."""
    return max(1, (CPU_PIECE if device.type == "cpu" else GPU_PIECE) // max(1, elements))


def _flatten_gradients(gradients: Tensor) -> Tensor:
    return gradients.reshape(*gradients.shape[:2], -1)


def sum_column_squares(factor: Tensor) -> Tensor:
    """Return the sum of squares over the columns, without an array of all squares."""
    if factor.device.type != "cpu":  # one kernel instead of one for each column
        return compute_squared_lengths(factor, 0)
    total = factor[0].square()
    for column in factor[1:]:
        total.addcmul_(column, column)
    return total


def compute_squared_lengths(vectors: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """Return squared norms along some axes, without an array of squares."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=axes)
    return lengths.square_()


def sum_groups(per_column: Tensor, groups: Sequence[slice]) -> Tensor:
    """Return the sums over groups of columns."""
    return torch.stack([per_column[group].sum(0) for group in groups])


class DenseGradient(FactoredGradient):
    """Gradients as an array, ``(columns, examples, *shape)``."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.columns, self.examples = values.shape[:2]
        self.shape = values.shape[2:]

    def to_dense(self) -> Tensor:
        return self.values

    def select_examples(self, examples: slice) -> DenseGradient:
        return DenseGradient(self.values[:, examples])

    def select_columns(self, columns: slice) -> DenseGradient:
        return DenseGradient(self.values[columns])

    def count_bytes(self) -> tuple[int, int]:
        return 0, self._count_column_bytes(self.values)

    @property
    def device(self) -> torch.device:
        return self.values.device


def unwrap_columns(g: Tensor) -> Tensor:
    """Return a vectorized tensor as ``(columns, *g)``; one that is not vectorized has one column."""
    if not _functorch.is_batchedtensor(g):
        return g.unsqueeze(0)
    return _functorch.get_unwrapped(g).movedim(_functorch.maybe_get_bdim(g), 0)


def apply_to_columns(change: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
    """Apply ``change`` to the array of all columns of a vectorized tensor."""
    changed = change(unwrap_columns(g))
    if not _functorch.is_batchedtensor(g):
        return changed.squeeze(0)
    return _functorch._add_batch_dim(changed, 0, _functorch.maybe_get_level(g))


_ARRAYS: ContextVar[dict[tuple[str, torch.dtype, torch.device], Tensor] | None] = ContextVar("arrays", default=None)


@contextmanager
def use_scratch() -> Iterator[None]:
    """Reuse the arrays of :func:`get_scratch_array` until the end of the block."""
    token = _ARRAYS.set({})
    try:
        yield
    finally:
        _ARRAYS.reset(token)


class HeapTrimmer:
    """Returns unused memory of the heap to the system, if the C library and the system allow it (glibc on Linux).

    Arrays of changing sizes do not fit into the gaps that others left, so the heap grows although little of it is in
    use. Trimming costs as much as touching new pages, so it is done only when the gaps add up.

    Args:
        room: bytes by which the process may grow before the heap is trimmed.
    """

    def __init__(self, room: int) -> None:
        self.room, self.low = room, _read_resident_bytes()

    def release(self) -> None:
        """Trim the heap if the process has grown too much since the last time."""
        if self.low and _read_resident_bytes() - self.low > self.room:
            self.trim()

    def trim(self) -> None:
        """Trim the heap."""
        if self.low:
            _find_malloc_trim()(0)
            self.low = _read_resident_bytes()


@cache
def _find_malloc_trim() -> Callable[[int], int]:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return lambda padding: 0
    return found


def _read_resident_bytes() -> int:
    """Return the resident memory of the process in bytes, or 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGESIZE
    except OSError:
        return 0


def get_scratch_array(use: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialized array. The next one for the same use may share its memory."""
    arrays = _ARRAYS.get()
    size = torch.Size(shape).numel()
    # CUDA's own allocator keeps its memory.
    if arrays is None or like.device.type != "cpu":
        return like.new_empty(shape)
    key = (use, like.dtype, like.device)
    if key not in arrays or arrays[key].numel() < size:
        arrays[key] = like.new_empty(size)
    return arrays[key][:size].view(shape)
