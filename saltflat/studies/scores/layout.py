"""Runs as arrays: their settings in the grid, and bootstrap resamples of configurations."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saltflat.errors import StudyError

Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"
# The value of an axis in one run, as a study file gives it.
Setting: TypeAlias = "bool | int | float | str | Sequence[Any] | Mapping[str, Any] | None"
# How often each resample contains each run, (runs, resamples): integers, which float32 represents exactly below 2^24.
Counts: TypeAlias = "NDArray[np.float32]"

# Runs times resamples that are processed at a time: 8 MB of float64.
BLOCK = 1_000_000


def check_paired_values(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Check and return two lists of finite numbers, one number of each per run."""
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise StudyError(
            f"Expected two lists with a number per run, but got values of shape {first.shape} and {second.shape}. "
            "Try passing both for the same runs."
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise StudyError("Expected finite numbers, but got a value that is not finite. Try leaving those runs out.")
    return first, second


def make_unit_counts(count: int) -> Counts:
    """Return the resample that contains every run once, which gives the score itself."""
    return np.ones((count, 1), dtype=np.float32)


def iter_blocks(times: Counts) -> Iterator[Counts]:
    """Yield some resamples at a time, so that intermediate arrays stay in the processor cache."""
    step = max(8, BLOCK // max(1, len(times)))
    for start in range(0, times.shape[1], step):
        yield times[:, start : start + step]


def divide_or_nan(part: Floats, whole: Floats) -> Floats:
    """Return the quotient; nan where the divisor is not positive."""
    whole = np.asarray(whole, dtype=np.float64)
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)


SEED = "seed"


@dataclass(frozen=True)
class GridLayout:
    """Settings of runs encoded as integers, equal if the settings are.

    Attributes:
        axes: one integer per run, by axis.
        seeds: one integer per run.
    """

    axes: Mapping[str, Ints]
    seeds: Ints

    @classmethod
    def from_settings(
        cls, axes: Mapping[str, Sequence[Setting]], seeds: Sequence[Setting] | None, runs: int
    ) -> GridLayout:
        """Return the layout of so many runs; without seeds, all runs have the same seed."""
        for name, values in {**axes, **({} if seeds is None else {SEED: seeds})}.items():
            if len(values) != runs:
                raise StudyError(
                    f"Expected one value of {name!r} per run, but got {len(values)} for {runs} runs. Try passing one "
                    "for each."
                )
        found = {name: encode_values(values) for name, values in axes.items() if name != SEED}
        return cls(found, np.zeros(runs, dtype=np.int64) if seeds is None else encode_values(seeds))

    def select_runs(self, which: Ints) -> GridLayout:
        """Return the layout of some of the runs."""
        return GridLayout({name: codes[which] for name, codes in self.axes.items()}, self.seeds[which])

    def find_varying_axes(self) -> dict[str, Ints]:
        """Return the axes with more than one value."""
        return {name: codes for name, codes in self.axes.items() if len(np.unique(codes)) > 1}

    def compute_levels(self, names: Iterable[str]) -> Ints:
        """Return an integer per run that is equal if all these axes are."""
        return combine_codes([self.axes[name] for name in names], len(self.seeds))


def encode_values(values: Iterable[Setting]) -> Ints:
    """Return integers that are equal if the values are, whatever their type.

    Example:
        >>> encode_values([[64, 32], "none", [64, 32], 1, 1.0]).tolist()
        [0, 1, 0, 2, 2]
    """
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(_make_hashable(value), len(seen)) for value in values], dtype=np.int64)


def combine_codes(codes: Sequence[Ints], runs: int) -> Ints:
    """Return an integer per run that is equal if all the codes are."""
    found = np.zeros(runs, dtype=np.int64)
    for each in codes:
        # Renumbered after every code, so that products stay below the square of the number of runs.
        _, found = np.unique(found * (each.max(initial=0) + 1) + each, return_inverse=True)
    return found


def _make_hashable(value: Setting) -> Hashable:
    if isinstance(value, Mapping):
        return ("mapping", tuple(sorted((str(name), _make_hashable(each)) for name, each in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(_make_hashable(each) for each in value))
    # True == 1 in Python, but they are different settings.
    return ("truth", value) if isinstance(value, bool) else value


# Resamples of CMI and PGDL, which take much longer than the other scores.
MAX_COSTLY_RESAMPLES = 200
DRAWN_AT_ONCE = 50


def draw_resamples(configurations: Ints, resamples: int, seed: int) -> Counts:
    """Return ``(runs, 1 + resamples)``: how often each resample contains each run; the first contains every run once.

    Configurations are drawn with replacement, each with all its runs: seeds of one configuration are similar, and
    treating them as independent runs would make the interval too narrow.
    """
    count = int(configurations.max()) + 1
    draw, share = np.random.default_rng(seed), np.full(count, 1 / count)
    times = np.ones((len(configurations), 1 + resamples), dtype=np.float32)
    for start in range(1, 1 + resamples, DRAWN_AT_ONCE):
        stop = min(start + DRAWN_AT_ONCE, 1 + resamples)
        times[:, start:stop] = draw.multinomial(count, share, size=stop - start)[:, configurations].T
    return times


def compute_interval(found: Floats) -> tuple[float, float]:
    """Return the interval that contains 95 % of the resamples; nan if fewer than half of them have a value."""
    known = found[~np.isnan(found)]
    if 2 * len(known) < max(len(found), 1):
        return float("nan"), float("nan")
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def compute_information_interval(found: Floats, estimate: float, most: float) -> tuple[float, float]:
    """Return the same interval, shifted so that the mean of the resamples is the estimate, and clipped to [0, most].

    Estimated information increases as the number of distinct pairs decreases, and a resample has fewer than the
    study: without the shift, all resamples can lie above the estimate.
    """
    known = found[~np.isnan(found)]
    low, high = compute_interval(found - (known.mean() - estimate) if len(known) else found)
    return float(np.clip(low, 0.0, most)), float(np.clip(high, 0.0, most))
