"""Data loaders in a fixed order, data held in memory, and selections of examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from saltflat.engine.data import Batch, Data, compute_digests, find_unsupported_kind, prepare_data, read_batches
from saltflat.errors import EmptyDataError, NondeterministicError, OptionError
from saltflat.validation import parse_integer

HELD = 1 << 30  # largest number of bytes to hold in memory if a loader's order cannot be fixed


def fix_loader_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader in the order of its dataset, if nothing but torch's own shuffling orders the examples.

    Loaders of other classes, and loaders with the user's own sampler or batch sampler, are returned as they are.
    """
    groups: Any = loader.batch_sampler
    sampler = _find_sampler(loader)
    in_order = getattr(loader, "in_order", True)  # otherwise workers' batches come as they are done
    is_random = type(sampler) is RandomSampler
    if sampler is None or (not is_random and in_order):
        return loader
    if is_random:
        _check_draws_all(loader, sampler, groups)
        sampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    same = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "generator")
    options = {name: getattr(loader, name) for name in (*same, "multiprocessing_context", "persistent_workers")}
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    if groups is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=sampler, **options)
    return DataLoader(
        loader.dataset, batch_sampler=BatchSampler(sampler, groups.batch_size, groups.drop_last), **options
    )


def _find_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that alone orders the examples of a loader, or None if something else does."""
    groups = loader.batch_sampler
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    return groups.sampler if type(groups) is BatchSampler else loader.sampler if groups is None else None


def has_fixed_order(data: Data) -> bool:
    """Return whether the data is a loader in the order of its dataset."""
    return isinstance(data, DataLoader) and type(_find_sampler(data)) is SequentialSampler


def _check_draws_all(loader: DataLoader[Any], sampler: RandomSampler, groups: BatchSampler | None) -> None:
    count = len(loader.dataset)  # type: ignore[arg-type]
    lost = count % groups.batch_size if groups is not None and groups.drop_last else 0
    part = sampler.num_samples != count
    if sampler.replacement or part or lost:
        how = f"and drops the last {lost} examples of each pass"
        how = "with replacement" if sampler.replacement else f"{sampler.num_samples} of {count}" if part else how
        raise NondeterministicError(
            f"Expected the same examples every time, but got a DataLoader that samples at random {how}: each pass "
            "holds other examples. Try measuring with shuffle=False, or passing list(loader) to measure what one "
            "pass yields."
        )


def load_into_memory(data: Data) -> list[Batch]:
    """Read data whose readings differ only in the order of the examples, and return it in a fixed order."""
    held: list[Batch] = []
    marks: list[bytes] = []
    size = 0
    for batch in read_batches(data):
        held.append(_copy_batch(batch))
        marks += compute_digests(batch)
        size += sum(leaf.numel() * leaf.element_size() for leaf in [*batch.list_tensors(), batch.targets])
        if size > HELD:
            raise NondeterministicError(
                f"Expected the same examples in the same order every time, but got a {type(data).__name__} whose "
                "first batch differs between two readings (shuffling or random augmentation), and too much data to "
                f"hold in memory ({HELD >> 30} GiB at most). Try measuring on un-augmented data, with shuffle=False "
                "or a sampler of a fixed order."
            )
    if Counter(marks) != Counter(mark for batch in read_batches(data) for mark in compute_digests(batch)):
        raise NondeterministicError(
            f"Expected the same examples every time, but got a {type(data).__name__} whose first batch differs "
            "between two readings, and not by the order of its examples alone (random augmentation, a random "
            "sample, or padding that depends on the batch). Try measuring on un-augmented data, or passing "
            "list(loader) to measure what one pass yields."
        )
    whole = _try_join_batches(held)
    if whole is None:
        return held
    # Sorted by content, so that the result does not depend on the state of a random number generator.
    order = torch.tensor(sorted(range(len(marks)), key=marks.__getitem__))
    largest = max(batch.examples for batch in held)
    return [whole.take(order[start : start + largest], start) for start in range(0, whole.examples, largest)]


def _copy_batch(batch: Batch) -> Batch:
    """Return a copy of a batch: an iterable may reuse the memory of its batches."""
    args, kwargs, targets = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (batch.args, batch.kwargs, batch.targets)
    )
    return Batch(args, kwargs, targets, batch.first, batch.examples)


def _try_join_batches(held: Sequence[Batch]) -> Batch | None:
    """Return all batches as one, or None if their shapes differ or an input belongs to no single example."""
    leaves, specs = zip(*(tree_flatten((each.args, each.kwargs, each.targets)) for each in held), strict=True)
    columns = list(zip(*leaves, strict=False))
    if any(spec != specs[0] for spec in specs) or not all(
        batch.has_example_axis(leaf) and leaf.shape[1:] == column[0].shape[1:]
        for column in columns
        for batch, leaf in zip(held, column, strict=True)
    ):
        return None
    args, kwargs, targets = tree_unflatten([torch.cat(column) for column in columns], specs[0])
    return Batch(args, kwargs, targets, 0, len(targets))


def select_examples(data: Data, skip: int = 0, limit: int | None = None) -> Any:
    """Return the examples after the first ``skip``, at most ``limit`` of them, in the order in which data is measured.

    Args:
        data: as for :func:`saltflat.measure`.
        skip: number of examples to skip.
        limit: largest number of examples to take; all if None.

    Example:
        >>> import torch
        >>> select_examples((torch.arange(6.0), torch.arange(6)), skip=1, limit=2)
        (tensor([1., 2.]), tensor([1, 2]))
    """
    skip, limit = check_skip_and_limit(skip, limit)
    if skip == 0 and limit is None:
        return data
    stop = None if limit is None else skip + limit
    # A pair of different lengths is not cut, so that the mismatch is reported later.
    if _is_dense_pair(data) and len(data[0]) == len(data[1]):
        _check_some_left(skip, len(data[0]))
        return tuple(part[skip:stop] for part in data)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__"):
        _check_some_left(skip, len(data))
        return Subset(data, range(len(data))[skip:stop])
    return data if _is_dense_pair(data) else DataSelection(data, skip, limit)


class DataSelection:
    """Batches with some of the examples of other data."""

    def __init__(self, data: Data, skip: int, limit: int | None) -> None:
        self.data, self.skip, self.limit = data, skip, limit
        self._source: Any = None
        # The session looks here for the random generators that reading advances.
        for name in ("generator", "sampler", "batch_sampler"):
            setattr(self, name, getattr(data, name, None))

    def __iter__(self) -> Iterator[Any]:
        if self._source is None:
            self._source = prepare_data(self.data)
        skip, left, seen = self.skip, self.limit, 0
        for batch in read_batches(self._source):
            seen += batch.examples
            if skip >= batch.examples:
                skip -= batch.examples
                continue
            part = batch.cut(skip, batch.examples if left is None else skip + left)
            skip = 0
            yield part.kwargs or part.args, part.targets
            if left is not None:
                left -= part.examples
                if left == 0:
                    return
        if seen:
            _check_some_left(self.skip, seen)

    def count_examples(self, available: int | None) -> int | None:
        """Return the number of selected examples if the data has ``available``."""
        if available is None:
            return None
        rest = max(available - self.skip, 0)
        return rest if self.limit is None else min(rest, self.limit)


def _is_dense_pair(data: Data) -> TypeGuard[Sequence[Tensor]]:
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and all(isinstance(part, Tensor) and find_unsupported_kind(part) is None and part.dim() > 0 for part in data)
    )


def check_skip_and_limit(skip: SupportsIndex, limit: SupportsIndex | None) -> tuple[int, int | None]:
    """Return both as integers, after checking that they are numbers of examples."""
    return _check_example_count("skip", skip, 0), None if limit is None else _check_example_count("limit", limit, 1)


def _check_example_count(name: str, value: SupportsIndex, least: int) -> int:
    number = parse_integer(value)
    if number is None or number < least:
        raise OptionError(
            f"Expected a whole number of examples, {least} or more, but got {name}={value!r}. Try leaving it out to "
            "take all."
        )
    return number


def _check_some_left(skip: int, count: int) -> None:
    if 0 < count <= skip:
        raise EmptyDataError(
            f"Expected at least one example after skip={skip}, but got data of {count} examples. Try skipping fewer."
        )


@dataclass(frozen=True)
class DeviceBatches:
    """Data whose batches are moved to a device when they are read; it can be read as often as the data."""

    data: Data
    device: torch.device

    def __iter__(self) -> Iterator[Batch]:
        for batch in read_batches(self.data):
            parts = batch.args, batch.kwargs, batch.targets
            args, kwargs, targets = tree_map(
                lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, parts
            )
            yield replace(batch, args=args, kwargs=kwargs, targets=targets)


def move_to_device(data: Data, device: torch.device) -> Data:
    """Return the data on a device: a pair of tensors is moved at once, batches when they are read."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return data[0].to(device), data[1].to(device)
    return DeviceBatches(prepare_data(data), device)
