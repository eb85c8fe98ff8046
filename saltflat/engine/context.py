"""The context of a measurement: a problem and the conditions, which every statistic is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from typing import Any

import torch
from torch import Tensor

from saltflat.engine.data import Batch
from saltflat.engine.geometry import Geometry, find_geometries
from saltflat.engine.output_curvature import ColumnPlan
from saltflat.engine.per_example import LayerCalls
from saltflat.engine.problem import Problem, cast_targets
from saltflat.engine.sampling import ExampleGroups, can_join, join_batches
from saltflat.engine.strategy import Probe, check_same_outputs, compute_working_memory, run_probe
from saltflat.errors import MemoryLimitWarning, SaltflatError, warn_caller
from saltflat.gradients.scratch import HeapTrimmer

Tick = Callable[[str, int, int | None], None]

SMALL = 32 << 20  # bytes that nobody needs to be warned of
ALONE, TOGETHER = 4, 16  # examples picked out of chunks that are run alone, and later ones at once
FEW = 32  # examples at most to keep for a look at them


class NotDefinedError(SaltflatError, ValueError):
    """This model, loss or data does not have the quantity asked for. The message is the reason."""


@dataclass(frozen=True)
class StatisticResult:
    """What a statistic found.

    Attributes:
        value: one tensor per parameter name, or whatever the statistic says of the network as a whole.
        replicates: the same with one random draw left out at a time; None where nothing random was drawn from.
        without: the same with one group of examples left out, a function of the group's number; None where that is not
            known. See :mod:`saltflat.engine.sampling`.
        exact: whether it is what its name says, to rounding.
        notes: what a reader should know besides.
    """

    value: Any
    replicates: tuple[Any, ...] | None = None
    without: Callable[[int], Any] | None = field(default=None, kw_only=True)
    exact: bool = True
    notes: tuple[str, ...] = ()


class Setting:
    """A problem and how to look at it.

    Attributes:
        problem: model, loss and data.
        plan: which columns stand for the loss's curvature.
        seed: of everything random.
        limit: bytes of working memory.
        initial: the parameters before training, where they were given.
        tick: called as ``tick(what, done, total)`` while work goes on.
        sampling: whether to find out how far the numbers depend on the choice of the examples.
        probes: how each kind of input is best swept, as far as seen.
        first: the first few examples that were probed.
    """

    def __init__(
        self,
        problem: Problem,
        plan: ColumnPlan,
        seed: int,
        limit: int,
        initial: Mapping[str, Tensor] | None = None,
        tick: Tick = lambda what, done, total: None,
        sampling: bool = False,
    ) -> None:
        self.problem, self.plan, self.seed, self.limit = problem, plan, seed, limit
        self.initial, self.tick, self.sampling = initial, tick, sampling
        self.heap = HeapTrimmer(limit // 3)
        # Inputs of other shapes may go through the model in another way: each kind is looked at when it first appears.
        self.probes: dict[tuple[Any, bool], Probe] = {}
        self.first: Batch | None = None
        self.results_bytes = self._said = 0
        self._seen: set[tuple[int, int, bool]] = set()
        self._picked: list[tuple[Batch, Tensor, Tensor]] = []
        self._counts: tuple[int, float, float] | None = None
        self._first: Batch | None = None
        self._geometries: Mapping[str, Geometry] | None = None

    def get_probe(self, batch: Batch) -> Probe:
        inputs = LayerCalls.from_batch(batch, []).inputs, tuple(each.dtype for each in batch.list_tensors())
        kind = (inputs, batch.examples > 1 or (inputs, True) in self.probes)
        self._first = self._first or batch.cut(0, 2)
        if kind not in self.probes:
            with torch.enable_grad():  # whoever asks may need none
                self.probes[kind] = run_probe(self.problem, batch, self.limit)
            self._warn_if_too_large()
        found = self.probes[kind]
        if self.first is None:
            self.first = batch.cut(0, max(1, min(FEW, self.limit // (found.fixed + found.moving))))
        return found

    def check_uncoupled(self, batch: Batch, outputs: Tensor) -> None:
        """Take an example out of this chunk, to see whether it has the same outputs in other company.

        Those of the first chunks are run alone. Those of later ones are run together, which costs little: what couples
        examples couples them with others there. See :meth:`check_picked`.
        """
        chunk = batch.first, batch.examples, batch.places is None
        if batch.examples == 1 or chunk in self._seen:
            return
        self._seen.add(chunk)
        number = batch.first * 7919 % batch.examples  # another place in every chunk
        one = batch.take(torch.tensor([number]), batch.first)
        self._picked.append((one, outputs[number : number + 1].detach().clone(), outputs.detach().abs().max()))
        found = self.get_probe(batch)
        fitting = compute_working_memory(self.limit) // (found.fixed + found.moving)
        if len(self._seen) <= ALONE or len(self._picked) >= min(TOGETHER, fitting):
            self.check_picked()

    def check_picked(self) -> None:
        """Refuse a model that gives the examples picked other outputs than it gave them before."""
        picked, self._picked = self._picked, []
        while picked:
            first, tolerance = picked[0][0], self.get_probe(picked[0][0]).tolerance
            alike = [each for each in picked if can_join(first, each[0]) and each[1].shape == picked[0][1].shape]
            alike = alike or picked[:1]
            picked = [each for each in picked if not any(each is other for other in alike)]
            batches, outputs, scales = zip(*alike, strict=True)
            check_same_outputs(self.problem, join_batches(batches), torch.cat(outputs), torch.stack(scales), tolerance)

    @property
    def example_bytes(self) -> int:
        """About what the largest kind of example takes that was seen, alone: no chunk takes less."""
        return max((found.fixed + found.moving for found in self.probes.values()), default=0)

    def warn_of_results(self, size: int) -> None:
        """Say before the work starts what will be held beside the working memory."""
        self.results_bytes = size
        if size > max(self.limit, SMALL):
            warn_caller(
                f"This call will take about {size >> 20} MiB beyond memory={self.limit >> 20} MiB: results and copies "
                "of the model's size cannot be split. Try fewer measures, or fewer layers (layers=).",
                MemoryLimitWarning,
            )

    def _warn_if_too_large(self) -> None:
        size = self.example_bytes
        if size > max(self.limit, SMALL, self._said):
            self._said = size
            warn_caller(
                f"memory={self.limit >> 20} MiB cannot be kept: one example takes about {size >> 20} MiB. Examples are "
                "taken one by one.",
                MemoryLimitWarning,
            )

    @property
    def geometries(self) -> Mapping[str, Geometry]:
        """How the measured parameters are matrices, as the model uses them on its first examples."""
        if self._geometries is None:
            first = self._first or next(iter(self.problem.read_batches())).cut(0, 2)
            self._geometries = find_geometries(self.problem.network, first)
        return self._geometries

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Leave so many bytes of the working memory to something else; at least a quarter stays for passes."""
        limit = self.limit
        try:
            self.limit = max(limit // 4, limit - size)
            yield
        finally:
            self.limit = limit

    def read_chunks(self, passes: int = 1) -> Iterator[Batch]:
        """All data, cut so that a forward pass and the graphs of so many backward passes fit in memory."""
        for batch in self.problem.read_batches():
            yield from self.split_batch(batch, passes)
        self.check_picked()

    def split_batch(self, batch: Batch, passes: int) -> Iterator[Batch]:
        """A batch, cut in the same way."""
        found = self.get_probe(batch)
        # Each differentiation keeps about as much again as the pass it differentiates.
        size = max(1, compute_working_memory(self.limit) // ((found.fixed + found.moving) << passes))
        for start in range(0, batch.examples, size):
            yield batch.cut(start, start + size)
            self.heap.release()

    @cached_property
    def groups(self) -> ExampleGroups | None:
        """The split of the examples that standard errors over examples are found with; None if nobody asks."""
        return ExampleGroups(self.problem.num_examples) if self.sampling else None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many examples each group has; empty without groups, or if there is but one."""
        if self.groups is None:
            return ()
        counts = torch.bincount(self.groups.find_groups(torch.arange(self.examples)), minlength=self.groups.count)
        sizes = tuple(size for size in counts.tolist() if size)
        return sizes if len(sizes) > 1 else ()

    @property
    def examples(self) -> int:
        """How many there are."""
        return self._compute_counts()[0]

    @property
    def mean_loss(self) -> float:
        """The loss of the data."""
        return self._compute_counts()[2]

    @property
    def mean_share(self) -> float:
        """An example's part of what the loss of the data is divided by, on average.

        The loss of the data is the mean over examples of each one's part of the sum, divided by this.
        """
        examples, share, _ = self._compute_counts()
        return share / examples

    def store_counts(self, examples: int, share: float, total: float) -> None:
        """Remember what a pass over all the data has counted."""
        self._counts = examples, share, total / share if share else nan

    def _compute_counts(self) -> tuple[int, float, float]:
        if self._counts is None:
            examples, share, total = 0, 0.0, 0.0
            with torch.no_grad():
                for batch in self.read_chunks(0):
                    outputs, targets = self.problem.network(batch).double(), cast_targets(batch.targets)
                    share += float(self.problem.loss.share(outputs, targets).sum())
                    total += float(self.problem.loss.total(outputs, targets).sum())
                    examples += batch.examples
            self.store_counts(examples, share, total)
        assert self._counts is not None
        return self._counts
