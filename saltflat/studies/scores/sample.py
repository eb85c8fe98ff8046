"""Runs that measures are scored on, with all that does not depend on the measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from saltflat.studies.scores.arrays import Floats, Ints
from saltflat.studies.scores.bootstrap import COSTLY
from saltflat.studies.scores.granulated import AxisPairs, axis_pairs
from saltflat.studies.scores.layout import Layout
from saltflat.studies.scores.robust import Environments, environments_of
from saltflat.studies.scores.sign_tables import Cells, Pairs, all_pairs, cells_of, sets_of

# Pairs times resamples that are held at once: 160 MB.
MOST_NUMBERS = 20_000_000


@dataclass(frozen=True)
class Sample:
    """Runs, where they stand, their gaps and how often each is in each resample.

    Attributes:
        gap: a number per run.
        layout: their settings.
        test_examples: of each run; None where the gap is no share of wrong answers.
        draws: ``(1 + resamples, runs)``; the first has every run once and gives the score itself.
    """

    gap: Floats
    layout: Layout
    test_examples: Floats | None
    draws: Floats

    def at(self, which: Ints) -> Sample:
        """Some of the runs."""
        sizes = None if self.test_examples is None else self.test_examples[which]
        return Sample(self.gap[which], self.layout.at(which), sizes, self.draws[:, which])

    @cached_property
    def axis_pairs(self) -> dict[str, AxisPairs]:
        return axis_pairs(self.layout)

    @cached_property
    def environments(self) -> Environments:
        return environments_of(self.gap, self.layout, self.test_examples)

    @cached_property
    def cells(self) -> Mapping[str, Cells]:
        """By the set of axes whose settings are known."""
        once = all_pairs(self.draws[:1])
        return {name: cells_of(self.layout, each, once) for name, each in sets_of(self.layout).items()}

    @cached_property
    def competition_sets(self) -> tuple[str, ...]:
        return tuple(sets_of(self.layout, 2))

    @property
    def pairs(self) -> Iterator[Pairs]:
        """All pairs, for some of the resamples at a time; the score itself comes first."""
        few = self.draws[: 1 + COSTLY]
        settings = len(np.unique(few, axis=1).T)
        step = max(1, MOST_NUMBERS // max(1, settings * (settings + 1) // 2))
        if step >= len(few):
            yield self._all_pairs
        else:
            for start in range(0, len(few), step):
                yield all_pairs(few[start : start + step])

    @cached_property
    def _all_pairs(self) -> Pairs:
        return all_pairs(self.draws[: 1 + COSTLY])

    @property
    def constant(self) -> bool:
        return bool(np.ptp(self.gap) == 0) if len(self.gap) else True
