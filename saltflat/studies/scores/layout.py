"""Where each run stands in the grid."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from saltflat.errors import StudyError
from saltflat.studies.scores.arrays import Ints

SEED = "seed"


@dataclass(frozen=True)
class GridLayout:
    """Settings of runs as whole numbers, equal where the settings are.

    Attributes:
        axes: by the name of the axis, a number per run.
        seeds: a number per run.
    """

    axes: Mapping[str, Ints]
    seeds: Ints

    @classmethod
    def from_settings(
        cls, axes: Mapping[str, Sequence[object]], seeds: Sequence[object] | None, runs: int
    ) -> GridLayout:
        """The layout of so many runs; without seeds all have the same."""
        for name, values in {**axes, **({} if seeds is None else {SEED: seeds})}.items():
            if len(values) != runs:
                raise StudyError(
                    f"Got {len(values)} values of {name!r} for {runs} runs. Want one per run. Do: give all of them."
                )
        found = {name: encode_values(values) for name, values in axes.items() if name != SEED}
        return cls(found, np.zeros(runs, dtype=np.int64) if seeds is None else encode_values(seeds))

    def select_runs(self, which: Ints) -> GridLayout:
        """Of some of the runs."""
        return GridLayout({name: codes[which] for name, codes in self.axes.items()}, self.seeds[which])

    def find_varying_axes(self) -> dict[str, Ints]:
        """The axes with more than one value."""
        return {name: codes for name, codes in self.axes.items() if len(np.unique(codes)) > 1}

    def compute_levels(self, names: Iterable[str]) -> Ints:
        """A number per run that is equal where all these axes are."""
        return combine_codes([self.axes[name] for name in names], len(self.seeds))


def encode_values(values: Iterable[object]) -> Ints:
    """Whole numbers that are equal where the values are, whatever these are.

    Example:
        >>> encode_values([[64, 32], "none", [64, 32], 1, 1.0]).tolist()
        [0, 1, 0, 2, 2]
    """
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(_make_hashable(value), len(seen)) for value in values], dtype=np.int64)


def combine_codes(codes: Sequence[Ints], runs: int) -> Ints:
    """A number per run that is equal where all the codes are."""
    found = np.zeros(runs, dtype=np.int64)
    for each in codes:
        # Numbered anew after every code: the product of two such numbers is no larger than the runs squared.
        _, found = np.unique(found * (each.max(initial=0) + 1) + each, return_inverse=True)
    return found


def _make_hashable(value: object) -> Hashable:
    if isinstance(value, Mapping):
        return ("mapping", tuple(sorted((str(name), _make_hashable(each)) for name, each in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(_make_hashable(each) for each in value))
    # True == 1 in Python, but as settings they are two.
    return ("truth", value) if isinstance(value, bool) else value
