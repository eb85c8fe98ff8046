"""How far a score could have come out otherwise with other configurations of the same kind."""

from __future__ import annotations

import numpy as np

from saltflat.studies.scores.arrays import Counts, Floats, Ints

# Scores of all pairs given all pairs of settings take so much longer that fewer resamples must do.
COSTLY = 200
DRAWN_AT_ONCE = 50


def draw_resamples(configurations: Ints, resamples: int, seed: int) -> Counts:
    """``(runs, 1 + resamples)``: how often each run is in each resample; the first has every run once.

    Configurations are drawn with replacement, and with one all its runs: seeds of one configuration are alike, and
    taken for independent runs they would make the interval too narrow.
    """
    count = int(configurations.max()) + 1
    draw, share = np.random.default_rng(seed), np.full(count, 1 / count)
    times = np.ones((len(configurations), 1 + resamples), dtype=np.float32)
    for start in range(1, 1 + resamples, DRAWN_AT_ONCE):
        stop = min(start + DRAWN_AT_ONCE, 1 + resamples)
        times[:, start:stop] = draw.multinomial(count, share, size=stop - start)[:, configurations].T
    return times


def compute_interval(found: Floats) -> tuple[float, float]:
    """Between which 95 % of the resamples lie; nan where fewer than half of them have a value."""
    known = found[~np.isnan(found)]
    if 2 * len(known) < max(len(found), 1):
        return float("nan"), float("nan")
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def compute_information_interval(found: Floats, estimate: float, most: float) -> tuple[float, float]:
    """The same, moved so that the mean of the resamples is the estimate, within 0 and the most there can be.

    Information looks larger the fewer different pairs it is taken from, and a resample has fewer than the study: as
    they are, the resamples can lie above the estimate altogether.
    """
    known = found[~np.isnan(found)]
    low, high = compute_interval(found - (known.mean() - estimate) if len(known) else found)
    return float(np.clip(low, 0.0, most)), float(np.clip(high, 0.0, most))
