"""What is measured and under which conditions: what every statistic is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from saltflat.columns import Plan
from saltflat.data import Batch
from saltflat.errors import SaltflatError
from saltflat.passes import Calls
from saltflat.probe import Probe, probe
from saltflat.problem import Problem, real

Tick = Callable[[str, int, int | None], None]


class NotDefinedError(SaltflatError, ValueError):
    """This model, loss or data does not have the quantity asked for. The message is the reason."""


@dataclass(frozen=True)
class Found:
    """What a statistic found.

    Attributes:
        value: one tensor per parameter name, or whatever the statistic says of the network as a whole.
        replicates: the same with one random draw left out at a time; None where nothing random was drawn from.
        exact: whether it is what its name says, to rounding.
        notes: what a reader should know besides.
    """

    value: Any
    replicates: tuple[Any, ...] | None = None
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
        probes: how each kind of input is best swept, as far as seen.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        seed: int,
        limit: int,
        initial: Mapping[str, Tensor] | None = None,
        tick: Tick = lambda what, done, total: None,
    ) -> None:
        self.problem, self.plan, self.seed, self.limit = problem, plan, seed, limit
        self.initial, self.tick = initial, tick
        # Inputs of other shapes may go through the model in another way: each kind is looked at when it first appears.
        self.probes: dict[tuple[tuple[torch.Size, ...], bool], Probe] = {}
        self._counts: tuple[int, float, float] | None = None

    def probe(self, batch: Batch) -> Probe:
        inputs = Calls.of(batch, []).inputs
        kind = (inputs, batch.examples > 1 or (inputs, True) in self.probes)
        if kind not in self.probes:
            with torch.enable_grad():  # whoever asks may need none
                self.probes[kind] = probe(self.problem, batch)
        return self.probes[kind]

    def chunks(self, passes: int = 1) -> Iterator[Batch]:
        """All data, cut so that a forward pass and the graphs of so many backward passes fit in memory."""
        for batch in self.problem.batches():
            found = self.probe(batch)
            # Each differentiation keeps about as much again as the pass it differentiates.
            size = max(1, self.limit // ((found.fixed + found.moving) << passes))
            for start in range(0, batch.examples, size):
                yield batch.cut(start, start + size)

    @property
    def examples(self) -> int:
        """How many there are."""
        return self._counted()[0]

    @property
    def mean_loss(self) -> float:
        """The loss of the data."""
        return self._counted()[2]

    @property
    def mean_share(self) -> float:
        """An example's part of what the loss of the data is divided by, on average.

        The loss of the data is the mean over examples of each one's part of the sum, divided by this.
        """
        examples, share, _ = self._counted()
        return share / examples

    def count(self, examples: int, share: float, total: float) -> None:
        """Remember what a pass over all the data has counted."""
        self._counts = examples, share, total / share if share else nan

    def _counted(self) -> tuple[int, float, float]:
        if self._counts is None:
            examples, share, total = 0, 0.0, 0.0
            with torch.no_grad():
                for batch in self.chunks(0):
                    outputs, targets = self.problem.network(batch).double(), real(batch.targets)
                    share += float(self.problem.loss.share(outputs, targets).sum())
                    total += float(self.problem.loss.total(outputs, targets).sum())
                    examples += batch.examples
            self.count(examples, share, total)
        assert self._counts is not None
        return self._counts
