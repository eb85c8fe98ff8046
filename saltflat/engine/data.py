"""Batches of examples, and data that can be read again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from saltflat.errors import DataError, EmptyDataError, NondeterministicError, OneShotDataError

# Everything that ``data=`` accepts; see :func:`prepare_data`.
Data: TypeAlias = Iterable[Any] | tuple[Tensor, Tensor] | Dataset[Any]
# What the model is called with, and one entry of it.
Inputs: TypeAlias = Tensor | Mapping[str, Any] | Sequence[Any]
Leaf: TypeAlias = Tensor | Mapping[str, Any] | bool | int | float | str | bytes | None
T = TypeVar("T")

SPANS = ("start_positions", "end_positions")  # labels of models that answer questions
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPARED_PLACES = 4096  # entries per example and tensor, about
COMPARED_AT_ONCE = 1 << 18  # entries, in whole numbers of eight bytes


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some examples. Slicing applies to every tensor whose first axis counts the examples.

    Attributes:
        args: positional inputs of the model.
        kwargs: keyword inputs of the model.
        targets: one per example.
        first: number of examples read before.
        examples: number of examples.
        places: the positions of the examples in the data if they are not ``first, first + 1, ...``.
        shared: the ids of the tensors that belong to all examples. They are known from the whole batch, which has
            another number of examples; a part of it may have as many examples as such a tensor has rows.
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
        """Return the position of each example in the data, ``(examples,)``."""
        return torch.arange(self.first, self.first + self.examples) if self.places is None else self.places

    def cut(self, start: int, stop: int) -> Batch:
        """Return the examples from ``start`` to ``stop``."""
        stop = min(stop, self.examples)
        args, kwargs = self.map_tensors(lambda t: t[start:stop])
        places = None if self.places is None else self.places[start:stop]
        return Batch(args, kwargs, self.targets[start:stop], self.first + start, stop - start, places, self.shared)

    def take(self, which: Tensor, first: int, places: Tensor | None = None) -> Batch:
        """Return the examples of these indices, numbered from ``first`` on or with the ``places`` given."""
        args, kwargs = self.map_tensors(lambda t: t[which.to(t.device)])
        return Batch(args, kwargs, self.targets[which.to(self.targets.device)], first, len(which), places, self.shared)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs with ``change`` applied to every tensor whose first axis counts the examples."""

        def change_leaf(leaf: T) -> T | Tensor:
            return change(leaf) if isinstance(leaf, Tensor) and self.has_example_axis(leaf) else leaf

        changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(change_leaf, (self.args, self.kwargs))
        return changed

    def has_example_axis(self, leaf: Leaf) -> bool:
        """Return whether an input is a tensor whose first axis counts the examples."""
        fits = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.examples
        return fits and id(leaf) not in self.shared

    def list_tensors(self) -> list[Tensor]:
        """Return all tensors among the inputs."""
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Tensor)]

    def to(self, dtype: torch.dtype | None) -> Batch:
        """Return the batch with floating-point tensors in another precision, and inference tensors as ordinary ones."""

        def convert_leaf(leaf: T) -> T | Tensor:
            if not isinstance(leaf, Tensor):
                return leaf
            value = (leaf.clone() if leaf.is_inference() else leaf).detach()
            return value.to(dtype) if dtype is not None and value.is_floating_point() else value

        args, kwargs, targets = tree_map(convert_leaf, (self.args, self.kwargs, self.targets))
        changed = Batch(args, kwargs, targets, self.first, self.examples, self.places)
        pairs = zip(self.list_tensors(), changed.list_tensors(), strict=True)
        return replace(changed, shared=frozenset(id(new) for old, new in pairs if not self.has_example_axis(old)))


def unpack_batch(item: Batch | Inputs, number: int = 0) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Return the positional and keyword inputs of the model and the targets; ``number`` is for error messages."""
    if isinstance(item, Batch):
        return item.args, item.kwargs, item.targets
    if isinstance(item, Mapping):
        inputs = dict(item)
        targets = inputs.pop("labels", None)
        spans = [inputs.get(name) for name in SPANS]
        if targets is None and all(isinstance(each, Tensor) for each in spans):
            # The two labels of a model that answers questions.
            targets = torch.stack([inputs.pop(name) for name in SPANS], 1)
        if not isinstance(targets, Tensor):
            raise DataError(
                "Expected a tensor under 'labels' beside the inputs, but got a dict with the keys "
                f"{sorted(map(str, item))} as batch {number}. Try renaming the targets to 'labels'."
            )
        return (), _convert_mappings(inputs, number), _convert_labels(targets, number)
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor):
        given, targets = _convert_mappings(item[0], number), _convert_labels(item[1], number)
        if isinstance(given, Tensor):
            return (given,), {}, targets
        if isinstance(given, Mapping):
            return (), dict(given), targets
        if isinstance(given, tuple | list):
            return tuple(given), {}, targets
    got = f"a {type(item).__name__}" + (f" of {len(item)} parts" if isinstance(item, tuple | list) else "")
    raise DataError(
        "Expected (inputs, targets) with targets a tensor and inputs a tensor, tuple or dict; or a dict with "
        f"'labels', but got {got} as batch {number}. Try giving the DataLoader a collate_fn that returns one of "
        "these."
    )


def find_unsupported_kind(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be split into examples and computed with, or None for ordinary ones."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return "sparse"
    return "meta" if tensor.is_meta else None


def _check_dense_leaf(leaf: Leaf, number: int) -> None:
    kind = find_unsupported_kind(leaf) if isinstance(leaf, Tensor) else None
    if kind is not None:
        advice = {
            "nested": "torch.nested.to_padded_tensor, with a model that masks the padding",
            "sparse": "to_dense()",
            "meta": "loading the data onto a device",
        }
        raise DataError(
            f"Expected dense tensors with values in batch {number}, but got a {kind} tensor. Try {advice[kind]}."
        )


def _convert_labels(targets: Tensor, number: int) -> Tensor:
    """Convert integers to int64: in uint8, the usual ignore_index of -100 would be class 156."""
    _check_dense_leaf(targets, number)
    whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    return targets.long() if whole else targets


def _convert_mappings(inputs: Inputs, number: int) -> Any:
    """Return the inputs with mappings that torch does not look into (UserDict, BatchEncoding) as plain dicts."""

    def convert_leaf(leaf: Leaf) -> Any:
        if isinstance(leaf, Mapping):
            return _convert_mappings(dict(leaf), number)
        held: Iterable[Any] = vars(leaf).values() if is_dataclass(leaf) and hasattr(leaf, "__dict__") else ()
        if any(isinstance(value, Tensor) for value in held):
            raise DataError(
                "Expected tensors in tuples, lists and dicts, which can be split into examples, but "
                f"got a {type(leaf).__name__} with tensors among the inputs of batch {number}. Try giving the "
                "DataLoader a collate_fn that returns one of these, and making the model accept it."
            )
        return leaf

    return tree_map(convert_leaf, inputs)


def compute_batch_checksums(batch: Batch) -> list[Tensor]:
    """Return one checksum per example of every tensor with examples, and one of every other tensor.

    They are integers, which do not depend on the order of summation, and weighted by position, since a mirrored image
    has the same pixels. Of large examples, entries at equal distances are used.
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


def compute_digests(batch: Batch) -> list[bytes]:
    """Return a digest of each example's content."""
    rows = [
        leaf.detach().cpu().contiguous().reshape(batch.examples, -1).view(torch.uint8).numpy()
        for leaf in [*batch.list_tensors(), batch.targets]
        if batch.has_example_axis(leaf) and leaf.numel()
    ]
    return [blake2b(b"".join(row[n].tobytes() for row in rows), digest_size=16).digest() for n in range(batch.examples)]


def _has_same_checksums(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def read_batches(data: Data) -> Iterator[Batch]:
    """Read the data once, batch by batch."""
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
                f"batch {number}. Try batching the examples, for instance with DataLoader(dataset, batch_size=128)."
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
                f"Expected as many inputs as targets along the first axis, but got {batch.examples} targets and "
                f"inputs of shape {shapes} in batch {number}. Check that inputs and targets belong "
                "together."
            )
        first += batch.examples
        yield batch


def _is_tensor_pair(data: Data) -> TypeGuard[Sequence[Tensor]]:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def _is_one_batch(data: Data) -> bool:
    """Return whether the data is a pair of tensors, several inputs with a tensor of targets, or a dict."""
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Mapping | tuple | list):
        return isinstance(data[1], Tensor)
    return _is_tensor_pair(data) or isinstance(data, Mapping)


def prepare_data(data: Data) -> Data:
    """Return the data in a form that yields the same examples in every reading, or raise an error that says why not."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=128)
    if isinstance(data, str):
        raise DataError(
            "Expected a DataLoader, a pair of tensors (inputs, targets) or a list of batches, but got the text "
            f"{data!r}. Try saltflat.datasets.read_data, which reads data by name."
        )
    if isinstance(data, Tensor):
        raise DataError(
            f"Expected inputs with targets, but got one tensor of shape {tuple(data.shape)}. Try passing a pair of "
            "tensors (inputs, targets)."
        )
    if isinstance(data, tuple | list) and any(type(part).__name__ == "ndarray" for part in data):
        raise DataError(
            "Expected a pair of tensors (inputs, targets), but got NumPy arrays. Try torch.from_numpy(array) for each."
        )
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
            f"Expected as many inputs as targets, but got {len(data[0])} inputs and {len(data[1])} targets. Check that "
            "they belong together."
        )
    if isinstance(data, RepeatableData):
        return data
    if isinstance(data, DataLoader):
        from saltflat.engine.read_data import fix_loader_order  # which builds on this module

        data = fix_loader_order(data)
    one = next(read_batches(data), None)
    if one is None:
        raise EmptyDataError(
            "Expected at least one example, but got empty data. Check the path, the split and drop_last."
        )
    held: Data = data
    if _is_one_batch(data) or type(data) in (list, tuple):
        return held  # each reading yields the same tensors
    # Checksums instead of a copy: a batch may be as large as the data.
    first, two = compute_batch_checksums(one), next(read_batches(data), None)
    if two is None:
        raise OneShotDataError(
            f"Expected data that can be read again, but got a {type(data).__name__} that is empty on the second "
            "reading. Try passing a list of its batches."
        )
    if not _has_same_checksums(first, compute_batch_checksums(two)):
        from saltflat.engine.read_data import has_fixed_order, load_into_memory

        if has_fixed_order(data):
            raise NondeterministicError(
                "Expected the same examples every time, but got a DataLoader whose first batch differs between two "
                "readings (random augmentation). Try measuring on a dataset without random transforms, or passing "
                "list(loader) to measure what one pass yields."
            )
        return load_into_memory(data)
    return RepeatableData(data)


class RepeatableData:
    """Data that must yield the same batches in every reading, since examples are identified by their positions.

    Later readings are compared with the first by a checksum of every example, which is cheap beside a forward pass.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data
        self.seen: list[list[Tensor]] = []
        self.is_complete = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def read_batches(self) -> Iterator[Batch]:
        """Read the data once; raise an error if it differs from the first reading."""
        number = -1
        for number, batch in enumerate(read_batches(self.data)):
            found = compute_batch_checksums(batch)
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
