"""Select the runs that measures are scored on, and collect their gaps, settings and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from saltflat.errors import StudyError, make_unknown_name_error
from saltflat.results.text import join_words
from saltflat.studies.grid import split_axis_names
from saltflat.studies.row import CONTROLS, Row, compute_controls
from saltflat.studies.scores.granulated import PairMeans, build_axis_means
from saltflat.studies.scores.layout import MAX_COSTLY_RESAMPLES, SEED, Counts, Floats, GridLayout, Ints, encode_values
from saltflat.studies.scores.robust import build_environment_means
from saltflat.studies.scores.sign_tables import Partition, build_partitions, list_axis_sets

MIN_RUNS = 2
NO_GAP = "without a finite gap"


def select_scored_runs(rows: Iterable[Row], gap: str, keep_missed: bool) -> tuple[list[Row], dict[str, int]]:
    """Return the runs to score, sorted by key, and the number of others by reason."""
    chosen, left_out = [], dict[str, int]()
    wanted = ("done", "missed") if keep_missed else ("done",)
    for row in sorted(rows, key=lambda each: each.key):
        known = math.isfinite(row.gap.get(gap, math.nan)) and math.isfinite(row.gap.get("error", math.nan))
        if row.status in wanted and known:
            chosen.append(row)
        else:
            reason = NO_GAP if row.status in wanted else row.status
            left_out[reason] = left_out.get(reason, 0) + 1
    if len(chosen) < MIN_RUNS:
        ended = join_words([f"{count} {reason}" for reason, count in left_out.items()])
        raise StudyError(
            f"Expected at least {MIN_RUNS} finished runs, but got {len(chosen)} run{'s' * (len(chosen) != 1)} to "
            f"score{(f' ({ended} left out)' if ended else '')}. Try running the study to its end, or missed='keep' to "
            "score runs that missed the stopping rule."
        )
    return chosen, left_out


def collect_gaps(rows: Sequence[Row], gap: str) -> Floats:
    """Return the gap of each run, test minus training."""
    found = np.array([row.gap[gap] for row in rows], dtype=np.float64)
    # Errors are multiples of 1 / examples: 0.3 - 0.1 and 0.2 - 0 are the same gap, though not the same float.
    return found.round(12) if gap == "error" else found


def build_layout(rows: Sequence[Row], axes: Sequence[str]) -> GridLayout:
    """Return the settings of the runs in the grid; the seed is not an axis."""
    known = dict.fromkeys(name for row in rows for name in row.config)
    found = {}
    for axis in axes:
        names = split_axis_names(axis)  # settings that vary together are one axis
        for name in names:
            if name not in known:
                raise make_unknown_name_error("axis", name, known)
        found[axis] = [[row.config.get(name) for name in names] for row in rows]
    return GridLayout.from_settings(found, [row.config.get(SEED) for row in rows], len(rows))


def number_configurations(rows: Sequence[Row]) -> Ints:
    """Return an integer per run, equal for runs that differ in the seed alone."""
    return encode_values({name: value for name, value in row.config.items() if name != SEED} for row in rows)


def collect_values(rows: Sequence[Row], measures: Sequence[str] | None) -> dict[tuple[str, str], Floats]:
    """Return a number per run by kind and name, measures first; nan if it is unknown or not finite."""
    taken = list(dict.fromkeys(name for row in rows for name in row.readings))
    for name in measures or ():
        if name not in taken:
            raise make_unknown_name_error("measure", name, taken)
    found = {}
    for name in taken if measures is None else dict.fromkeys(measures):
        found["measure", name] = [row.readings[name].value if name in row.readings else math.nan for row in rows]
    controls = [compute_controls(row) for row in rows]
    for name in CONTROLS:
        found["control", name] = [each.get(name, math.nan) for each in controls]
    arrays = {key: np.array(each, dtype=np.float64) for key, each in found.items()}
    return {key: np.where(np.isfinite(each), each, np.nan) for key, each in arrays.items()}


@dataclass(frozen=True)
class RunSample:
    """Runs with their settings, gaps and resamples.

    Attributes:
        gap: one number per run.
        layout: their settings.
        test_examples: the number for each run; None if the gap is not a difference of error rates.
        units: one integer per run; runs with the same one are drawn together.
        times: ``(runs, 1 + resamples)``; the first contains every run once and gives the score itself.
        seed: for random subsets of too many pairs.
        projected: whether resamples of information are approximated by a projection.
    """

    gap: Floats
    layout: GridLayout
    test_examples: Floats | None
    units: Ints
    times: Counts
    seed: int
    projected: bool

    def select_runs(self, which: Ints) -> RunSample:
        """Return the sample of some of the runs."""
        if len(which) == len(self.gap):
            return self
        sizes = None if self.test_examples is None else self.test_examples[which]
        layout, times = self.layout.select_runs(which), self.times[which]
        return RunSample(self.gap[which], layout, sizes, self.units[which], times, self.seed, self.projected)

    @cached_property
    def few_times(self) -> Counts:
        """Return the resamples used for costly scores, without the first one."""
        return np.ascontiguousarray(self.times[:, 1 : 1 + MAX_COSTLY_RESAMPLES])

    @cached_property
    def axis_means(self) -> dict[str, PairMeans]:
        """Return, by axis, the pairs that differ in it alone."""
        return build_axis_means(self.gap, self.layout, self.units, self.seed)

    @cached_property
    def environments(self) -> PairMeans:
        """Return the pairs whose settings differ in one axis."""
        return build_environment_means(self.gap, self.layout, self.test_examples, self.units, self.seed)

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        """Return the runs grouped by their settings, by set of axes."""
        return build_partitions(self.layout, seed=self.seed)

    @cached_property
    def competition_sets(self) -> tuple[str, ...]:
        """Return the names of the sets of axes that the PGDL competition uses."""
        return tuple(list_axis_sets(self.layout, 2))

    @property
    def is_constant(self) -> bool:
        """Return whether all gaps are equal."""
        return bool(np.ptp(self.gap) == 0) if len(self.gap) else True
