"""Runs that measures are scored on, with all that does not depend on the measure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from saltflat.studies.scores.arrays import Counts, Floats, Ints
from saltflat.studies.scores.bootstrap import COSTLY
from saltflat.studies.scores.granulated import build_axis_means
from saltflat.studies.scores.layout import GridLayout
from saltflat.studies.scores.pair_means import PairMeans
from saltflat.studies.scores.robust import build_environment_means
from saltflat.studies.scores.sign_tables import Partition, build_partitions, list_axis_sets


@dataclass(frozen=True)
class RunSample:
    """Runs, where they stand, their gaps and how often each is in each resample.

    Attributes:
        gap: a number per run.
        layout: their settings.
        test_examples: of each run; None where the gap is no share of wrong answers.
        units: of each run, what it is drawn with: a number per configuration.
        times: ``(runs, 1 + resamples)``; the first has every run once and gives the score itself.
        seed: of random choices where there is too much to take all.
        projected: whether resamples of information come from a projection.
    """

    gap: Floats
    layout: GridLayout
    test_examples: Floats | None
    units: Ints
    times: Counts
    seed: int
    projected: bool

    def select_runs(self, which: Ints) -> RunSample:
        """Some of the runs."""
        if len(which) == len(self.gap):
            return self
        sizes = None if self.test_examples is None else self.test_examples[which]
        layout, times = self.layout.select_runs(which), self.times[which]
        return RunSample(self.gap[which], layout, sizes, self.units[which], times, self.seed, self.projected)

    @cached_property
    def few_times(self) -> Counts:
        """As many resamples as the costly scores take, without the score itself."""
        return np.ascontiguousarray(self.times[:, 1 : 1 + COSTLY])

    @cached_property
    def axis_means(self) -> dict[str, PairMeans]:
        """By axis, pairs that differ in it alone."""
        return build_axis_means(self.gap, self.layout, self.units, self.seed)

    @cached_property
    def environments(self) -> PairMeans:
        """Pairs whose settings differ in one axis."""
        return build_environment_means(self.gap, self.layout, self.test_examples, self.units, self.seed)

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        """By the set of axes whose settings are known."""
        return build_partitions(self.layout, seed=self.seed)

    @cached_property
    def competition_sets(self) -> tuple[str, ...]:
        return tuple(list_axis_sets(self.layout, 2))

    @property
    def is_constant(self) -> bool:
        return bool(np.ptp(self.gap) == 0) if len(self.gap) else True
