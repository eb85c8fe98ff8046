"""Batches of examples, from whatever the user's data is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from saltflat.errors import DataError, EmptyDataError, NondeterministicError, OneShotDataError

Data: TypeAlias = Iterable[Any] | tuple[Tensor, Tensor] | Dataset[Any]


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some examples; every tensor whose first axis counts the examples is cut with them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Tensor
    first: int
    examples: int

    def cut(self, start: int, stop: int) -> Batch:
        stop = min(stop, self.examples)
        args, kwargs = self.map(lambda t: t[start:stop])
        return Batch(args, kwargs, self.targets[start:stop], self.first + start, stop - start)

    def take(self, which: Tensor, first: int) -> Batch:
        """Some of the examples, numbered from ``first`` on."""
        args, kwargs = self.map(lambda t: t[which.to(t.device)])
        return Batch(args, kwargs, self.targets[which.to(self.targets.device)], first, len(which))

    def map(self, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs with ``change`` applied to every tensor that has the examples as its first axis."""

        def one(leaf: Any) -> Any:
            return change(leaf) if self.counts(leaf) else leaf

        changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(one, (self.args, self.kwargs))
        return changed

    def counts(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.examples

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Tensor)]

    def to(self, dtype: torch.dtype | None) -> Batch:
        """Floating-point inputs in another precision; inference tensors become ordinary ones."""

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.is_inference():
                leaf = leaf.clone()
            return leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf.detach()

        args, kwargs, targets = tree_map(one, (self.args, self.kwargs, self.targets))
        return Batch(args, kwargs, targets, self.first, self.examples)


def batches(data: Data) -> Iterator[Batch]:
    """One pass over the data."""
    first = 0
    for number, item in enumerate([data] if _is_one_batch(data) else iter(data)):
        args, kwargs, targets = inputs_and_targets(item, number)
        if targets.dim() == 0:
            raise DataError(
                f"Got a target without an axis for the examples in batch {number}. "
                "Want targets of shape (examples, ...). "
                "Do: batch single examples, for instance with DataLoader(dataset, batch_size=128)."
            )
        batch = Batch(args, kwargs, targets, first, targets.shape[0])
        if batch.examples == 0:
            continue
        if not any(batch.counts(leaf) for leaf in batch.tensors()):
            shapes = [tuple(leaf.shape) for leaf in batch.tensors()]
            raise DataError(
                f"Got {batch.examples} targets and inputs of shape {shapes} in batch {number}. "
                "Want the same number of examples along the first axis of both. "
                "Do: check that inputs and targets belong together."
            )
        first += batch.examples
        yield batch


def _is_pair(data: Any) -> TypeGuard[Sequence[Tensor]]:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def _is_one_batch(data: Any) -> bool:
    """A pair of tensors; or inputs of several tensors with a tensor of targets; or a dict with labels."""
    several = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Mapping | tuple | list)
    several = several and isinstance(data[1], Tensor)
    return _is_pair(data) or several or (isinstance(data, Mapping) and isinstance(data.get("labels"), Tensor))


def inputs_and_targets(item: Any, number: int = 0) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """What to call the model with, by place and by name, and the targets, of batch ``number``."""
    if isinstance(item, Mapping):
        inputs = dict(item)
        targets = inputs.pop("labels", None)
        if not isinstance(targets, Tensor):
            raise DataError(
                f"Got a dict with the keys {sorted(map(str, item))} as batch {number}. "
                "Want a tensor under 'labels' beside the inputs. Do: rename the targets to 'labels'."
            )
        return (), inputs, targets
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor):
        inputs, targets = item
        if isinstance(inputs, Tensor):
            return (inputs,), {}, targets
        if isinstance(inputs, Mapping):
            return (), dict(inputs), targets
        if isinstance(inputs, tuple | list):
            return tuple(inputs), {}, targets
    got = f"a {type(item).__name__}" + (f" of {len(item)} parts" if isinstance(item, tuple | list) else "")
    raise DataError(
        f"Got {got} as batch {number}. "
        "Want (inputs, targets) with targets a tensor and inputs a tensor, tuple or dict; or a dict with 'labels'. "
        "Do: give the DataLoader a collate_fn that returns one of these."
    )


def checked(data: Any) -> Data:
    """Data that can be read as often as needed and answers the same each time; else an error that says why not."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=128)
    if not isinstance(data, Iterable):
        raise DataError(
            f"Got data of type {type(data).__name__}. "
            "Want a DataLoader, a pair of tensors (inputs, targets) or a list of batches. "
            "Do: wrap your examples in one of these."
        )
    if isinstance(data, Iterator):
        raise OneShotDataError(
            f"Got a {type(data).__name__}, which can be read only once. Want data that can be read again. "
            "Do: pass list(...) of it, or the DataLoader itself."
        )
    if _is_pair(data) and len(data[0]) != len(data[1]):
        raise DataError(
            f"Got {len(data[0])} inputs and {len(data[1])} targets. Want as many of one as of the other. "
            "Do: check that they belong together."
        )
    _check_repeats(data)
    return _in_order(data)


def _in_order(data: Data) -> Data:
    """A shuffled loader's data in the order of its dataset: examples are told apart by their number in a pass."""
    if not isinstance(data, DataLoader) or not isinstance(data.sampler, RandomSampler):
        return data
    same = ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    return DataLoader(
        data.dataset,
        multiprocessing_context=data.multiprocessing_context,
        persistent_workers=data.persistent_workers,
        **{name: getattr(data, name) for name in same},
    )


def _check_repeats(data: Data) -> None:
    if _is_one_batch(data) and not _is_pair(data):
        if next(batches(data), None) is None:
            raise _empty()
        return
    if _is_pair(data):
        if len(data[0]) == 0:
            raise _empty()
        return
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        _check_loader(data)
        if isinstance(data.sampler, RandomSampler):
            # Another order is the same data; the examples themselves were compared.
            return
    one, two = (next(batches(data), None) for _ in range(2))
    if one is None:
        raise _empty()
    if two is None:
        raise OneShotDataError(
            f"Got a {type(data).__name__} that gave nothing on the second reading. Want data that can be read again. "
            "Do: pass a list of its batches."
        )
    if not _same(one, two):
        raise NondeterministicError(
            "Got data whose first batch differs between two readings (shuffling or random augmentation). "
            "Want the same examples every time. Do: measure on un-augmented data, read in a fixed order."
        )


def _check_loader(loader: DataLoader[Any]) -> None:
    dataset, sampler = loader.dataset, loader.sampler
    count = len(dataset)  # type: ignore[arg-type]
    if count == 0:
        raise _empty()
    if isinstance(sampler, RandomSampler):
        lost = count % (loader.batch_size or 1)
        part = sampler.num_samples != count
        if sampler.replacement or part or (loader.drop_last and lost):
            how = f"and drops the last {lost} examples of each pass"
            how = "with replacement" if sampler.replacement else f"{sampler.num_samples} of {count}" if part else how
            raise NondeterministicError(
                f"Got a DataLoader that samples at random {how}: every pass holds other examples. "
                "Want the same examples every time. Do: measure with shuffle=False."
            )
    if isinstance(sampler, RandomSampler | SequentialSampler):
        one, two = (tree_flatten(dataset[0])[0] for _ in range(2))
        if not _alike(one, two):
            raise NondeterministicError(
                "Got a dataset whose first example differs when read twice (random augmentation). "
                "Want the same examples every time. Do: measure on a dataset without random transforms."
            )


def _same(one: Batch, two: Batch) -> bool:
    return _alike([*one.tensors(), one.targets], [*two.tensors(), two.targets])


def _alike(one: list[Any], two: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            # NaN equals NaN here: it is reported by its own check.
            return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        try:
            return bool(a == b)
        except (TypeError, ValueError, RuntimeError):  # arrays, images: no single answer
            return True

    return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))


def _empty() -> EmptyDataError:
    return EmptyDataError("Got data without examples. Want at least one. Do: check the path, the split and drop_last.")
