"""Groups of examples, which standard errors over examples are found with.

The examples are split at random into a few groups. Every statistic is kept group by group, so that any function of
statistics can be evaluated with one group left out at a time, and the scatter of these values gives its standard error.
The split depends on the number of examples alone: two networks measured on the same data have the same groups, and the
error of their *difference* comes from the differences group by group, in which most of the scatter cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from saltflat.engine.data import Batch

MOST_GROUPS = 20
LEAST_GROUPS = 8
GROUP_SIZE = 50  # examples in a group, as long as that makes at least LEAST_GROUPS of them


class ExampleGroups:
    """A random split of the examples.

    Args:
        examples: how many there are; None where that is not known before the data has been read.
    """

    def __init__(self, examples: int | None) -> None:
        self.examples = examples
        fitting = MOST_GROUPS if examples is None else min(MOST_GROUPS, max(LEAST_GROUPS, examples // GROUP_SIZE))
        self.count = fitting if examples is None else max(1, min(fitting, examples))
        self._numbers = None
        if examples is not None:
            self._numbers = torch.from_numpy(np.random.default_rng(0).permutation(examples) % self.count)

    def find_groups(self, places: Tensor) -> Tensor:
        """The group of the examples at these positions in the data."""
        known = 0 if self._numbers is None else len(self._numbers)
        inside = places < known
        found = torch.empty(len(places), dtype=torch.long)
        if self._numbers is not None:
            found[inside] = self._numbers[places[inside]]
        # Data of unknown length, or longer than it said: independent draws, so that any position has a group.
        drawn = [int(np.random.Philox(key=[0, n]).random_raw()) % self.count for n in places[~inside].tolist()]
        found[~inside] = torch.tensor(drawn, dtype=torch.long)
        return found


def iterate_groups(batches: Iterable[Batch], groups: ExampleGroups, window: int) -> Iterator[tuple[int, Batch]]:
    """The examples, group by group, within windows of consecutive batches that hold about ``window`` bytes together.

    Sums over a group are as large as the network: few visits to each group keep adding them up cheap.
    """
    done = 0
    for joined in _iterate_windows(batches, window):
        numbers = joined.example_indices
        group = groups.find_groups(numbers)
        for number in group.unique().tolist():
            which = torch.nonzero(group == number)[:, 0]
            yield number, joined.take(which, done, numbers[which])
            done += len(which)


def _iterate_windows(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    held: list[Batch] = []
    room = size
    for batch in chain.from_iterable(_cut_batch(whole, size) for whole in batches):
        if held and (room < 0 or not can_join(held[-1], batch)):
            yield join_batches(held)
            held, room = [], size
        held.append(batch)
        room -= _count_bytes(batch)
    if held:
        yield join_batches(held)


def _cut_batch(batch: Batch, size: int) -> Iterator[Batch]:
    """Parts of a batch that hold about ``size`` bytes each."""
    step = -(-batch.examples // max(1, -(-_count_bytes(batch) // max(1, size))))
    for start in range(0, batch.examples, step):
        yield batch if step == batch.examples else batch.cut(start, start + step)


def _count_bytes(batch: Batch) -> int:
    return sum(each.numel() * each.element_size() for each in [*batch.list_tensors(), batch.targets])


def can_join(one: Batch, two: Batch) -> bool:
    """Whether two batches are alike in everything but the number of examples."""
    parts, others = ([*tree_flatten((b.args, b.kwargs))[0], b.targets] for b in (one, two))
    if tree_flatten((one.args, one.kwargs))[1] != tree_flatten((two.args, two.kwargs))[1]:
        return False

    def is_alike(a: object, b: object) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return (
                one.has_example_axis(a)
                and two.has_example_axis(b)
                and a.shape[1:] == b.shape[1:]
                and a.dtype == b.dtype
            )
        return a is b or (isinstance(a, bool | int | float | str) and type(a) is type(b) and a == b)

    return all(is_alike(a, b) for a, b in zip(parts, others, strict=True))


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Batches that :func:`can_join` as one."""
    if len(batches) == 1:
        return batches[0]
    leaves, tree = zip(*(tree_flatten((b.args, b.kwargs)) for b in batches), strict=True)
    joined = [torch.cat(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*leaves, strict=True)]
    args, kwargs = tree_unflatten(joined, tree[0])
    targets = torch.cat([b.targets for b in batches])
    return Batch(args, kwargs, targets, batches[0].first, len(targets))


class GroupedMean:
    """A mean over examples, kept group by group.

    Args:
        groups: how the examples are split; None for the mean alone.
    """

    def __init__(self, groups: ExampleGroups | None) -> None:
        self.groups = groups
        self.sums = torch.zeros(groups.count if groups else 1, dtype=torch.float64)
        self.shares = torch.zeros_like(self.sums)
        self.examples = torch.zeros_like(self.sums)

    def add(self, batch: Batch, values: Tensor, shares: Tensor) -> None:
        """Add single examples' values, and each one's part of what their sum is divided by."""
        group = (
            self.groups.find_groups(batch.example_indices)
            if self.groups
            else torch.zeros(batch.examples, dtype=torch.long)
        )
        self.sums.index_add_(0, group, values.detach().double().cpu())
        self.shares.index_add_(0, group, shares.detach().double().cpu())
        self.examples.index_add_(0, group, torch.ones(batch.examples, dtype=torch.float64))

    def add_sums(self, group: int, batch: Batch, value: float, share: float) -> None:
        """Add what examples of one group have together."""
        self.sums[group] += value
        self.shares[group] += share
        self.examples[group] += batch.examples

    def compute_mean(self) -> float:
        return float(self.sums.sum() / self.shares.sum())

    def make_leave_one_out(self) -> Callable[[int], float] | None:
        """The mean with one group left out, as a function of the group's number among those with examples."""
        kept = torch.nonzero(self.examples)[:, 0]
        # A group that holds all the share (every other example is ignored) leaves nothing to divide by.
        if len(kept) < 2 or bool((self.shares.sum() - self.shares[kept] <= 0).any()):
            return None
        return lambda left_out: float(
            (self.sums.sum() - self.sums[kept[left_out]]) / (self.shares.sum() - self.shares[kept[left_out]])
        )


class Fingerprint:
    """A number that tells whether two passes saw the same examples in the same order.

    It does not depend on how the examples were batched, on the device, or on the precision they were measured in.
    """

    def __init__(self) -> None:
        self._sum = 0

    def add(self, batch: Batch) -> None:
        for place, leaf in enumerate([*batch.list_tensors(), batch.targets]):
            if not batch.has_example_axis(leaf):
                continue
            step = max(1, (1 << 18) // max(1, leaf[0].numel()))
            for start in range(0, batch.examples, step):
                rows = _convert_to_integers(leaf[start : start + step])
                factors = _scramble_integers(torch.arange(rows.shape[1], device=rows.device) * 2 + 2 * place + 1) | 1
                each = _scramble_integers((rows * factors).sum(1))
                where = _scramble_integers(batch.example_indices[start : start + step].to(rows.device)) | 1
                self._sum = (self._sum + int((each * where).sum())) % 2**64

    def __str__(self) -> str:
        return f"{self._sum:016x}"


def _convert_to_integers(rows: Tensor) -> Tensor:
    flat = rows.detach().reshape(len(rows), -1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.to(torch.complex64)).flatten(1)
    if flat.is_floating_point():
        # Positive and negative zero are the same number.
        flat = (flat.to(torch.float32) + 0.0).contiguous().view(torch.int32)
    return flat.to(torch.int64)


def _scramble_integers(values: Tensor) -> Tensor:
    """Scramble 64-bit integers (the finalizer of SplitMix64, as far as signed shifts allow)."""
    values = (values ^ (values >> 30)) * -4658895280553007687
    values = (values ^ (values >> 27)) * -7723592293110705685
    return values ^ (values >> 31)
