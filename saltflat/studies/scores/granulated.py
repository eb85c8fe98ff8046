"""Granulated Kendall (Jiang et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.arrays import Floats, Ints, check_paired_values, divide_or_nan, make_unit_counts
from saltflat.studies.scores.layout import GridLayout, combine_codes
from saltflat.studies.scores.pair_means import PairMeans, compute_sample_share, find_pairs_within


@dataclass(frozen=True)
class GranulatedKendall:
    """The mean over the axes, and each axis; nan where no two runs differ in that axis alone."""

    mean: float
    by_axis: dict[str, float]


def granulated_kendall(
    x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[object]], seeds: Sequence[object] | None = None
) -> GranulatedKendall:
    r"""Whether the measure follows the gap when one setting changes and all others stay, from -1 to 1.

    .. math::
        \psi_i = \operatorname{mean}_{\text{settings of the other axes and the seed}} \tau_a, \qquad
        \Psi = \operatorname{mean}_i \psi_i

    :math:`\tau_a` is taken over the runs that differ in axis :math:`i` alone. A setting with fewer than two such runs
    is left out. A measure that only knows one axis gets no more than that axis' share.

    Args:
        x: of the measure, a number per run.
        y: of the gap.
        axes: by name, the setting of each run.
        seeds: of each run; only runs with the same seed are compared.

    Example:
        >>> found = granulated_kendall([1, 1, 2, 2], [1, 2, 3, 4], {"lr": [1, 1, 2, 2], "batch": [8, 16, 8, 16]})
        >>> found.by_axis, found.mean
        ({'lr': 1.0, 'batch': 0.0}, 0.5)
    """
    values, gaps = check_paired_values(x, y)
    count = len(values)
    along = build_axis_means(gaps, GridLayout.from_settings(axes, seeds, count), np.arange(count), 0)
    found = {name: each.resample(values[None], make_unit_counts(count))[0] for name, each in along.items()}
    by_axis = {name: float(each[0]) for name, each in found.items()}
    return GranulatedKendall(float(average_axes(found, 1)[0]), by_axis)


def build_axis_means(y: Floats, layout: GridLayout, units: Ints, seed: int) -> dict[str, PairMeans]:
    """For each axis the pairs that differ in it alone, by the setting of all the others."""
    found = {}
    for name, codes in layout.axes.items():
        others = [each for other, each in layout.axes.items() if other != name]
        setting = combine_codes([*others, layout.seeds], len(codes))
        share = compute_sample_share([(setting, codes)])
        first, second = find_pairs_within(setting, codes, share, seed)
        group = combine_codes([setting[first]], len(first))
        found[name] = PairMeans(first, second, group, np.ones(len(first)), y, units, share=share, seed=seed)
    return found


def average_axes(by_axis: Mapping[str, Floats], resamples: int) -> Floats:
    """The mean over the axes that have a value."""
    each = np.stack(list(by_axis.values())) if by_axis else np.full((1, resamples), np.nan)
    known = ~np.isnan(each)
    return divide_or_nan(np.where(known, each, 0.0).sum(0), known.sum(0))
