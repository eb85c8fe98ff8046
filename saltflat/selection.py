"""Some of the examples, of data of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from saltflat.amounts import parse_integer
from saltflat.data import find_unsupported_kind, prepare_data, read_batches
from saltflat.errors import EmptyDataError, OptionError


def select_examples(data: Any, skip: int = 0, limit: int | None = None) -> Any:
    """The examples after the first ``skip``, at most ``limit`` of them, in the order in which data is measured.

    Args:
        data: as for :func:`saltflat.measure`.
        skip: how many examples to leave out.
        limit: how many to take; all if None.

    Example:
        >>> import torch
        >>> select_examples((torch.arange(6.0), torch.arange(6)), skip=1, limit=2)
        (tensor([1., 2.]), tensor([1, 2]))
    """
    skip, limit = check_skip_and_limit(skip, limit)
    if skip == 0 and limit is None:
        return data
    stop = None if limit is None else skip + limit
    # A pair that does not fit together stays as it is: cut, nobody could tell any more.
    if _is_dense_pair(data) and len(data[0]) == len(data[1]):
        _check_some_left(skip, len(data[0]))
        return tuple(part[skip:stop] for part in data)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__"):
        _check_some_left(skip, len(data))
        return Subset(data, range(len(data))[skip:stop])
    return data if _is_dense_pair(data) else DataSelection(data, skip, limit)


class DataSelection:
    """Batches with some of the examples of other data; can be read as often as that."""

    def __init__(self, data: Any, skip: int, limit: int | None) -> None:
        self.data, self.skip, self.limit = data, skip, limit
        self._source: Any = None
        # Where random generators are looked for that reading moves on.
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
        """How many examples there are, if the data has ``available``."""
        if available is None:
            return None
        rest = max(available - self.skip, 0)
        return rest if self.limit is None else min(rest, self.limit)


def _is_dense_pair(data: Any) -> bool:
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and all(isinstance(part, Tensor) and find_unsupported_kind(part) is None and part.dim() > 0 for part in data)
    )


def check_skip_and_limit(skip: Any, limit: Any) -> tuple[int, int | None]:
    """Both as whole numbers, if they are."""
    return _check_example_count("skip", skip, 0), None if limit is None else _check_example_count("limit", limit, 1)


def _check_example_count(name: str, value: Any, least: int) -> int:
    number = parse_integer(value)
    if number is None or number < least:
        raise OptionError(
            f"Got {name}={value!r}. Want a whole number of examples, {least} or more. Do: leave it out to take all."
        )
    return number


def _check_some_left(skip: int, count: int) -> None:
    if 0 < count <= skip:
        raise EmptyDataError(f"Got skip={skip} for data of {count} examples. Want some to be left. Do: skip fewer.")
