"""Split a batch into parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from saltflat.errors import DataError, EmptyDataError

# Anything nested from tensors, tuples, lists and mappings.
TrainingBatch: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
Tree = TypeVar("Tree")

COARSE = (torch.float16, torch.bfloat16)


def compute_part_sizes(examples: int, parts: int) -> list[int]:
    """Return sizes of parts that differ by at most one, the larger ones first; no part is empty.

    >>> compute_part_sizes(10, 4), compute_part_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    parts = min(parts, examples)
    return [examples // parts + (i < examples % parts) for i in range(parts)]


@dataclass(frozen=True)
class BatchParts:
    """A batch split into parts, in the order of its examples.

    Attributes:
        batch: tensors whose first axis has ``examples`` entries are split, everything else is shared.
        examples: the number of examples.
        count: the number of parts, at most one per example.
        dtype: the precision for half-precision inputs, which belong to autocast; it is off for the parts.
    """

    batch: TrainingBatch
    examples: int
    count: int
    dtype: torch.dtype

    def iterate_parts(self) -> Iterator[tuple[TrainingBatch, float]]:
        """Yield every part with its share of the examples."""
        start = 0
        for size in compute_part_sizes(self.examples, self.count):
            yield (
                self.replace_tensors([t[start : start + size] for t in self._find_cut_tensors()]),
                size / self.examples,
            )
            start += size

    def iterate_stacks(self) -> Iterator[tuple[list[Tensor], float]]:
        """Yield all parts of one size: every split tensor as ``(parts, size, ...)``, with the share of each part."""
        each, start = compute_part_sizes(self.examples, self.count), 0
        for size in dict.fromkeys(each):
            many = each.count(size)
            stop = start + many * size
            yield [t[start:stop].unflatten(0, (many, size)) for t in self._find_cut_tensors()], size / self.examples
            start = stop

    def replace_tensors(self, leaves: Sequence[Tensor]) -> TrainingBatch:
        """Return the batch with these instead of the tensors that are split."""
        values = iter(leaves)
        return map_tensors(lambda t: next(values) if self._is_cut(t) else t, self.batch)

    def copy_part(self, part: Tree) -> Tree:
        """Return a copy of a part for one pass."""
        return copy_batch(part, self.dtype)

    def _find_cut_tensors(self) -> list[Tensor]:
        return [t for t in find_tensors(self.batch) if self._is_cut(t)]

    def _is_cut(self, t: Tensor) -> bool:
        return t.dim() > 0 and len(t) == self.examples


def copy_batch(batch: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Return a copy of a batch for one pass, since models may write to their inputs.

    Args:
        batch: any batch.
        dtype: the precision for half-precision inputs; None keeps them.
    """

    def copy_tensor(t: Tensor) -> Tensor:
        same = t.detach().to(dtype) if dtype is not None and t.dtype in COARSE else t.detach().clone()
        return same.requires_grad_() if t.requires_grad else same

    return map_tensors(copy_tensor, batch)


def find_tensors(tree: TrainingBatch) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and mappings."""
    found: list[Tensor] = []

    def record_tensor(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(record_tensor, tree)
    return found


def count_examples(batch: TrainingBatch) -> int:
    """Return the number of examples in a batch, according to its targets, or else to its first tensor.

    >>> count_examples((torch.zeros(6, 2), torch.zeros(6)))
    6
    """
    leaves = find_tensors(batch)
    for leaf in leaves:
        if leaf.is_nested:
            raise DataError(
                "Expected tensors whose first axis counts the examples, but got a nested one. Try "
                "torch.nested.to_padded_tensor, with a model that handles padding."
            )
    targets = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        targets = batch[1]
    if not isinstance(targets, Tensor):
        targets = next((each for each in leaves if each.dim() > 0), None)
    if targets is None or targets.dim() == 0:
        raise DataError(
            "Expected tensors whose first axis counts the examples, but got a batch without one. Try a tuple or a "
            "dict of tensors, with a batch axis even for a single example."
        )
    if len(targets) == 0:
        raise EmptyDataError("Expected at least one example, but got an empty batch. Try leaving it out.")
    if len(leaves) > 1 and sum(each.dim() > 0 and len(each) == len(targets) for each in leaves) < 2:
        raise DataError(
            f"Expected as many inputs as targets along the first axis, but got {len(targets)} targets with tensors of "
            f"shape {[tuple(each.shape) for each in leaves]}. Check that inputs and targets belong together."
        )
    for leaf in leaves:
        if leaf.layout != torch.strided and leaf.dim() > 0 and len(leaf) == len(targets):
            raise DataError(
                "Expected dense tensors, which can be split into parts, but got a sparse one. Try to_dense()."
            )
    return len(targets)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return the same nested tuples, lists and mappings with every tensor changed."""
    return cast("Tree", _map_tensors(change, tree))


def _map_tensors(change: Callable[[Tensor], Tensor], tree: Tree) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        same = copy.copy(tree)  # keeps whatever kind of dict it is
        same.update({key: _map_tensors(change, value) for key, value in tree.items()})
        return same
    if isinstance(tree, MutableMapping):
        other = copy.copy(tree)
        for key, value in tree.items():
            other[key] = _map_tensors(change, value)
        return other
    if isinstance(tree, tuple | list):
        items = [_map_tensors(change, each) for each in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree
