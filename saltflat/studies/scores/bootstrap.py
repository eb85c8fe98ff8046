"""How far a score could have come out otherwise with other configurations of the same kind."""

from __future__ import annotations

import numpy as np

from saltflat.studies.scores.arrays import Floats, Ints

# Scores of all pairs given all pairs of settings take so much longer that fewer resamples must do.
COSTLY = 200


def drawn(configurations: Ints, resamples: int, seed: int) -> Floats:
    """``(1 + resamples, runs)``: how often each run is in each resample; the first has every run once.

    Configurations are drawn with replacement, and with one all its runs: seeds of one configuration are alike, and
    taken for independent runs they would make the interval too narrow.
    """
    count = int(configurations.max()) + 1
    draw = np.random.default_rng(seed)
    times = draw.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)
    return np.concatenate([np.ones((1, len(configurations))), times[:, configurations]])


def interval(found: Floats) -> tuple[float, float]:
    """Between which 95 % of the resamples lie; nan where fewer than half of them have a value."""
    known = found[~np.isnan(found)]
    if 2 * len(known) < max(len(found), 1):
        return float("nan"), float("nan")
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def information_interval(found: Floats, estimate: float, most: float) -> tuple[float, float]:
    """The same, moved so that the mean of the resamples is the estimate, within 0 and the most there can be.

    Information looks larger the fewer different pairs it is taken from, and a resample has fewer than the study: as
    they are, the resamples can lie above the estimate altogether.
    """
    known = found[~np.isnan(found)]
    low, high = interval(found - (known.mean() - estimate) if len(known) else found)
    return float(np.clip(low, 0.0, most)), float(np.clip(high, 0.0, most))
