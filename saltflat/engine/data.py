"""Batches of examples, from whatever the user's data is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from saltflat.errors import DataError, EmptyDataError, NondeterministicError, OneShotDataError

Data: TypeAlias = Iterable[Any] | tuple[Tensor, Tensor] | Dataset[Any]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPARED_PLACES = 4096  # per example and tensor, about
COMPARED_AT_ONCE = 1 << 18  # places, in whole numbers of eight bytes


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some examples; every tensor whose first axis counts the examples is cut with them.

    Attributes:
        args: positional inputs of the model.
        kwargs: inputs by name.
        targets: one per example.
        first: how many examples were read before.
        examples: how many there are.
        places: the positions of the examples in the data where they are not ``first, first + 1, ...``.
        shared: which tensors belong to all examples, by ``id``: known from the whole batch, whose number of examples
            differs from theirs. A part of it may have as many examples as such a tensor has rows.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Tensor
    first: int
    examples: int
    places: Tensor | None = None
    shared: frozenset[int] = frozenset()

    @property
    def example_indices(self) -> Tensor:
        """``(examples,)``: the position of each example in the data."""
        return torch.arange(self.first, self.first + self.examples) if self.places is None else self.places

    def cut(self, start: int, stop: int) -> Batch:
        stop = min(stop, self.examples)
        args, kwargs = self.map_tensors(lambda t: t[start:stop])
        places = None if self.places is None else self.places[start:stop]
        return Batch(args, kwargs, self.targets[start:stop], self.first + start, stop - start, places, self.shared)

    def take(self, which: Tensor, first: int, places: Tensor | None = None) -> Batch:
        """Some of the examples, numbered from ``first`` on or with the ``places`` given."""
        args, kwargs = self.map_tensors(lambda t: t[which.to(t.device)])
        return Batch(args, kwargs, self.targets[which.to(self.targets.device)], first, len(which), places, self.shared)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs with ``change`` applied to every tensor that has the examples as its first axis."""

        def change_leaf(leaf: Any) -> Any:
            return change(leaf) if self.has_example_axis(leaf) else leaf

        changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(change_leaf, (self.args, self.kwargs))
        return changed

    def has_example_axis(self, leaf: Any) -> bool:
        fits = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.examples
        return fits and id(leaf) not in self.shared

    def list_tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Tensor)]

    def to(self, dtype: torch.dtype | None) -> Batch:
        """Floating-point inputs in another precision; inference tensors become ordinary ones."""

        def convert_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.is_inference():
                leaf = leaf.clone()
            leaf = leaf.detach()
            return leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf

        args, kwargs, targets = tree_map(convert_leaf, (self.args, self.kwargs, self.targets))
        changed = Batch(args, kwargs, targets, self.first, self.examples, self.places)
        pairs = zip(self.list_tensors(), changed.list_tensors(), strict=True)
        return replace(changed, shared=frozenset(id(new) for old, new in pairs if not self.has_example_axis(old)))


def unpack_batch(item: Any, number: int = 0) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """What to call the model with, by place and by name, and the targets, of batch ``number``."""
    if isinstance(item, Batch):
        return item.args, item.kwargs, item.targets
    if isinstance(item, Mapping):
        inputs = dict(item)
        targets = inputs.pop("labels", None)
        if not isinstance(targets, Tensor):
            raise DataError(
                "Expected a tensor under 'labels' beside the inputs, but got a dict with the keys "
                f"{sorted(map(str, item))} as batch {number}. Try renaming the targets to 'labels'."
            )
        return (), _convert_mappings(inputs, number), _convert_labels(targets, number)
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor):
        inputs, targets = _convert_mappings(item[0], number), _convert_labels(item[1], number)
        if isinstance(inputs, Tensor):
            return (inputs,), {}, targets
        if isinstance(inputs, Mapping):
            return (), dict(inputs), targets
        if isinstance(inputs, tuple | list):
            return tuple(inputs), {}, targets
    got = f"a {type(item).__name__}" + (f" of {len(item)} parts" if isinstance(item, tuple | list) else "")
    raise DataError(
        "Expected (inputs, targets) with targets a tensor and inputs a tensor, tuple or dict; or a dict with "
        f"'labels', but got {got} as batch {number}. Try giving the DataLoader a collate_fn that returns one of "
        "these."
    )


def find_unsupported_kind(tensor: Tensor) -> str | None:
    """What keeps a tensor from being cut into examples and computed with; None for ordinary ones."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return "sparse"
    return "meta" if tensor.is_meta else None


def _check_dense_leaf(leaf: Any, number: int) -> None:
    kind = find_unsupported_kind(leaf) if isinstance(leaf, Tensor) else None
    if kind is not None:
        advice = {
            "nested": "torch.nested.to_padded_tensor, with a model that knows the padding",
            "sparse": "to_dense()",
            "meta": "loading the data onto a device",
        }
        raise DataError(
            f"Expected dense tensors with values in batch {number}, but got a {kind} tensor. Try {advice[kind]}."
        )


def _convert_labels(targets: Tensor, number: int) -> Tensor:
    """Whole numbers as int64: in uint8, the usual ignore_index of -100 is class 156."""
    _check_dense_leaf(targets, number)
    whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    return targets.long() if whole else targets


def _convert_mappings(inputs: Any, number: int) -> Any:
    """The inputs with a plain dict for every mapping that torch does not look into (UserDict, BatchEncoding)."""

    def convert_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return _convert_mappings(dict(leaf), number)
        held = vars(leaf).values() if is_dataclass(leaf) and hasattr(leaf, "__dict__") else ()
        if any(isinstance(value, Tensor) for value in held):
            raise DataError(
                "Expected tensors in tuples, lists and dicts, so that single examples can be taken out of them, but "
                f"got a {type(leaf).__name__} with tensors among the inputs of batch {number}. Try giving the "
                "DataLoader a collate_fn that returns these, and making the model accept them."
            )
        return leaf

    return tree_map(convert_leaf, inputs)


def _compute_batch_checksums(batch: Batch) -> list[Tensor]:
    """A checksum per example for every tensor that has examples; one for others.

    In whole numbers, which do not depend on the order of summation, and weighted by place: a mirrored image has the
    same pixels. Of large examples some places, all over them, have to do.
    """

    def compute_leaf_checksums(leaf: Tensor) -> Tensor:
        rows = leaf if batch.has_example_axis(leaf) or leaf is batch.targets else leaf.unsqueeze(0)
        step = max(1, COMPARED_AT_ONCE // max(1, min(rows[0].numel(), 2 * COMPARED_PLACES)))
        return torch.cat([_compute_row_checksums(part) for part in rows.split(step)])

    return [
        compute_leaf_checksums(leaf) for leaf in [*batch.list_tensors(), batch.targets] if leaf.layout == torch.strided
    ]


def _compute_row_checksums(rows: Tensor) -> Tensor:
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    bits = rows.view(BITS[rows.element_size()]) if rows.is_floating_point() else rows
    each = bits.reshape(len(rows), -1)
    each = each[:, :: each.shape[1] // COMPARED_PLACES | 1]
    places = torch.arange(each.shape[1], device=rows.device)
    return (each * (places * 2654435761 % (1 << 31) | 1)).sum(1)


def _compute_digests(batch: Batch) -> list[bytes]:
    """What tells each example from others."""
    rows = [
        leaf.detach().cpu().contiguous().reshape(batch.examples, -1).view(torch.uint8).numpy()
        for leaf in [*batch.list_tensors(), batch.targets]
        if batch.has_example_axis(leaf) and leaf.numel()
    ]
    return [blake2b(b"".join(row[n].tobytes() for row in rows), digest_size=16).digest() for n in range(batch.examples)]


def _has_same_checksums(one: list[Any], two: list[Any]) -> bool:
    def is_equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            # NaN equals NaN here: it is reported by its own check.
            return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        try:
            return bool(a == b)
        except (TypeError, ValueError, RuntimeError):  # arrays, images: no single answer
            return True

    return len(one) == len(two) and all(is_equal(a, b) for a, b in zip(one, two, strict=True))


def read_batches(data: Data) -> Iterator[Batch]:
    """One pass over the data."""
    if isinstance(data, RepeatableData):
        yield from data.read_batches()
        return
    first = 0
    for number, item in enumerate([data] if _is_one_batch(data) else iter(data)):
        args, kwargs, targets = unpack_batch(item, number)
        for leaf in tree_flatten((args, kwargs))[0]:
            _check_dense_leaf(leaf, number)
        if targets.dim() == 0:
            raise DataError(
                "Expected targets of shape (examples, ...), but got a target without an axis for the examples in "
                f"batch {number}. Try batching single examples, for instance with DataLoader(dataset, "
                "batch_size=128)."
            )
        batch = Batch(args, kwargs, targets, first, targets.shape[0])
        batch = replace(
            batch, shared=frozenset(id(leaf) for leaf in batch.list_tensors() if not batch.has_example_axis(leaf))
        )
        if batch.examples == 0:
            continue
        if not any(batch.has_example_axis(leaf) for leaf in batch.list_tensors()):
            shapes = [tuple(leaf.shape) for leaf in batch.list_tensors()]
            raise DataError(
                f"Expected the same number of examples along the first axis of both, but got {batch.examples} "
                f"targets and inputs of shape {shapes} in batch {number}. Check that inputs and targets belong "
                "together."
            )
        first += batch.examples
        yield batch


def _is_tensor_pair(data: Any) -> TypeGuard[Sequence[Tensor]]:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def _is_one_batch(data: Any) -> bool:
    """A pair of tensors; or inputs of several tensors with a tensor of targets; or a dict."""
    several = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Mapping | tuple | list)
    several = several and isinstance(data[1], Tensor)
    return _is_tensor_pair(data) or several or isinstance(data, Mapping)


def prepare_data(data: Any) -> Data:
    """Data that can be read as often as needed and answers the same each time; else an error that says why not."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=128)
    if not isinstance(data, Iterable):
        raise DataError(
            "Expected a DataLoader, a pair of tensors (inputs, targets) or a list of batches, but got data of type "
            f"{type(data).__name__}. Try wrapping your examples in one of these."
        )
    if isinstance(data, Iterator):
        raise OneShotDataError(
            f"Expected data that can be read again, but got a {type(data).__name__}, which can be read only once. "
            "Try passing list(...) of it, or the DataLoader itself."
        )
    if (
        _is_tensor_pair(data)
        and all(find_unsupported_kind(part) is None and part.dim() for part in data)
        and len(data[0]) != len(data[1])
    ):
        raise DataError(
            f"Expected as many of one as of the other, but got {len(data[0])} inputs and {len(data[1])} targets. "
            "Check that they belong together."
        )
    if isinstance(data, RepeatableData):
        return data
    if isinstance(data, DataLoader):
        from saltflat.engine.read_data import _fix_loader_order  # which builds on this module

        data = _fix_loader_order(data)
    one = next(read_batches(data), None)
    if one is None:
        raise EmptyDataError(
            "Expected at least one, but got data without examples. Check the path, the split and drop_last."
        )
    held: Data = data
    if _is_one_batch(data) or type(data) in (list, tuple):
        return held  # every reading yields the same tensors
    # Checksums instead of a copy: a batch may be as large as the data.
    first, two = _compute_batch_checksums(one), next(read_batches(data), None)
    if two is None:
        raise OneShotDataError(
            f"Expected data that can be read again, but got a {type(data).__name__} that gave nothing on the second "
            "reading. Try passing a list of its batches."
        )
    if not _has_same_checksums(first, _compute_batch_checksums(two)):
        from saltflat.engine.read_data import _has_fixed_order, _load_into_memory

        if _has_fixed_order(data):
            raise NondeterministicError(
                "Expected the same examples every time, but got a DataLoader whose first batch differs between two "
                "readings (random augmentation). Try measuring on a dataset without random transforms, or passing "
                "list(loader) to measure what one pass yields."
            )
        return _load_into_memory(data)
    return RepeatableData(data)


class RepeatableData:
    """Data that has to yield the same batches in every reading: the examples are told apart by their numbers.

    Later readings are compared with the first by a checksum of every example, which costs little beside a forward pass.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data
        self.seen: list[list[Tensor]] = []
        self.is_complete = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def read_batches(self) -> Iterator[Batch]:
        number = -1
        for number, batch in enumerate(read_batches(self.data)):
            found = _compute_batch_checksums(batch)
            if number < len(self.seen):
                same = _has_same_checksums(self.seen[number], found)
            else:
                same = not self.is_complete
                self.seen.append(found)
            if not same:
                raise self._make_change_error(f"batch {number}")
            yield batch
        if number + 1 < len(self.seen):
            raise self._make_change_error(f"the number of batches ({number + 1} after {len(self.seen)})")
        self.is_complete = True

    def _make_change_error(self, what: str) -> NondeterministicError:
        return NondeterministicError(
            f"Expected the same examples in the same order every time, but got a {type(self.data).__name__} whose "
            f"readings differ in {what} (shuffling or random augmentation). Try measuring on un-augmented data with "
            "shuffle=False, or passing list(loader) to measure what one pass yields."
        )
