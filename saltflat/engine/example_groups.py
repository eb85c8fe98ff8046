"""The groups of examples that standard errors come from.

The examples are split at random into a few groups. Every statistic is kept group by group, so that any function of
statistics can be evaluated with one group left out at a time, and the scatter of these values gives its standard error.
The split depends on the number of examples alone: two networks measured on the same data have the same groups, and the
error of their *difference* is estimated from the differences group by group, in which most of the scatter cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from saltflat.engine.data import Batch, Leaf
from saltflat.engine.processes import Processes

MOST_GROUPS = 20
LEAST_GROUPS = 8
GROUP_SIZE = 50  # examples in a group, if that makes at least LEAST_GROUPS of them


@dataclass
class GroupCounts:
    """The number of examples of a group that were swept, and their loss."""

    examples: int = 0
    loss: float = 0.0
    share: float = 0.0

    @classmethod
    def add_up(cls, parts: Iterable[GroupCounts]) -> GroupCounts:
        """Return the counts of several parts of a group."""
        examples, losses, shares = zip(*((each.examples, each.loss, each.share) for each in parts), strict=True)
        return cls(sum(examples), fsum(losses), fsum(shares))


class ExampleGroups:
    """A random split of the examples into groups.

    Args:
        examples: number of examples; None if it is not known before the data has been read.
    """

    def __init__(self, examples: int | None) -> None:
        self.examples = examples
        fitting = MOST_GROUPS if examples is None else min(MOST_GROUPS, max(LEAST_GROUPS, examples // GROUP_SIZE))
        self.count = fitting if examples is None else max(1, min(fitting, examples))
        self._numbers = None
        if examples is not None:
            self._numbers = torch.from_numpy(np.random.default_rng(0).permutation(examples) % self.count)

    @classmethod
    def from_numbers(cls, numbers: Tensor, count: int) -> ExampleGroups:
        """Return a split into ``count`` groups, some of which may be empty, from the group of every example."""
        groups = cls(len(numbers))
        groups.count, groups._numbers = count, numbers
        return groups

    def find_groups(self, places: Tensor) -> Tensor:
        """Return the groups of the examples at these positions in the data."""
        known = 0 if self._numbers is None else len(self._numbers)
        inside = places < known
        found = torch.empty(len(places), dtype=torch.long)
        if self._numbers is not None:
            found[inside] = self._numbers[places[inside]]
        # If the length is unknown, or wrong, groups are drawn independently, so that every position has one.
        drawn = [int(np.random.Philox(key=[0, n]).random_raw()) % self.count for n in places[~inside].tolist()]
        found[~inside] = torch.tensor(drawn, dtype=torch.long)
        return found


class GroupedMean:
    """A mean over examples, kept group by group.

    Args:
        groups: the split of the examples; None for the mean alone.
    """

    def __init__(self, groups: ExampleGroups | None) -> None:
        self.groups = groups
        self.sums = torch.zeros(groups.count if groups else 1, dtype=torch.float64)
        self.shares = torch.zeros_like(self.sums)
        self.examples = torch.zeros_like(self.sums)

    def add(self, batch: Batch, values: Tensor, shares: Tensor) -> None:
        """Add single examples' values and their parts of the divisor."""
        group = (
            self.groups.find_groups(batch.example_indices)
            if self.groups
            else torch.zeros(batch.examples, dtype=torch.long)
        )
        self.sums.index_add_(0, group, values.detach().double().cpu())
        self.shares.index_add_(0, group, shares.detach().double().cpu())
        self.examples.index_add_(0, group, torch.ones(batch.examples, dtype=torch.float64))

    def add_sums(self, group: int, batch: Batch, value: float, share: float) -> None:
        """Add the sums over examples of one group."""
        self.sums[group] += value
        self.shares[group] += share
        self.examples[group] += batch.examples

    def combine(self, processes: Processes) -> None:
        """Add the sums of the other processes."""
        kept = {"sums": self.sums, "shares": self.shares, "examples": self.examples}
        vars(self).update(processes.sum_tensors("a mean", kept, self.sums.device))

    def compute_mean(self) -> float:
        """Return the mean over all examples."""
        return float(self.sums.sum() / self.shares.sum())

    def make_leave_one_out(self) -> Callable[[int], float] | None:
        """Return a function of a group's number, among those with examples, that computes the mean without it."""
        kept = torch.nonzero(self.examples)[:, 0]
        # Without a group that holds the whole share (all other examples are ignored) there is nothing to divide by.
        if len(kept) < 2 or bool((self.shares.sum() - self.shares[kept] <= 0).any()):
            return None
        return lambda left_out: float(
            (self.sums.sum() - self.sums[kept[left_out]]) / (self.shares.sum() - self.shares[kept[left_out]])
        )


def iterate_groups(batches: Iterable[Batch], groups: ExampleGroups, window: int) -> Iterator[tuple[int, Batch]]:
    """Yield the examples group by group, within windows of consecutive batches of about ``window`` bytes together.

    Sums over a group are as large as the network, so each group should be added to a few times only.
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
        room -= count_batch_bytes(batch)
    if held:
        yield join_batches(held)


def _cut_batch(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield parts of a batch of about ``size`` bytes each."""
    step = -(-batch.examples // max(1, -(-count_batch_bytes(batch) // max(1, size))))
    for start in range(0, batch.examples, step):
        yield batch if step == batch.examples else batch.cut(start, start + step)


def count_batch_bytes(batch: Batch) -> int:
    """Return the bytes of the inputs and targets of a batch."""
    return sum(each.numel() * each.element_size() for each in [*batch.list_tensors(), batch.targets])


def can_join(one: Batch, two: Batch) -> bool:
    """Return whether two batches differ in nothing but the number of examples and their content."""
    parts, others = ([*tree_flatten((b.args, b.kwargs))[0], b.targets] for b in (one, two))
    if tree_flatten((one.args, one.kwargs))[1] != tree_flatten((two.args, two.kwargs))[1]:
        return False

    def is_alike(a: Leaf, b: Leaf) -> bool:
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
    """Return batches for which :func:`can_join` holds as one."""
    if len(batches) == 1:
        return batches[0]
    leaves, tree = zip(*(tree_flatten((b.args, b.kwargs)) for b in batches), strict=True)
    joined = [torch.cat(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*leaves, strict=True)]
    args, kwargs = tree_unflatten(joined, tree[0])
    targets = torch.cat([b.targets for b in batches])
    ends = [b.first + b.examples for b in batches[:-1]]
    consecutive = ends == [b.first for b in batches[1:]] and all(b.places is None for b in batches)
    places = None if consecutive else torch.cat([b.example_indices for b in batches])
    return Batch(args, kwargs, targets, batches[0].first, len(targets), places)
