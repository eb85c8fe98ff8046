"""Robust sign error (Dziugaite et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.granulated import PairMeans, compute_sample_share, count_pairs_within, find_pairs_within
from saltflat.studies.scores.layout import Counts, Floats, GridLayout, Ints, Setting, check_paired_values, combine_codes


@dataclass(frozen=True)
class SignError:
    """The share of wrongly ordered pairs over the environments; nan if there is no environment.

    Attributes:
        mean, p90, max: over the environments; the 90th percentile is interpolated.
        environments: the number of environments with positive weight.
    """

    mean: float
    p90: float
    max: float
    environments: int


def hoeffding_weight(difference: ArrayLike, examples: ArrayLike) -> Floats:
    r"""Return the confidence that two gaps differ, from 0 to 1, each estimated from so many test examples.

    .. math::
        \max(0,\; 1 - 2 e^{-2 n (\Delta / 2)^2})^2

    Example:
        >>> [round(float(each), 3) for each in hoeffding_weight([0.01, 0.02, 0.05], 10_000)]
        [0.0, 0.532, 1.0]
    """
    half = np.asarray(difference, dtype=np.float64) / 2
    return np.asarray(np.maximum(0.0, 1 - 2 * np.exp(-2 * np.asarray(examples, dtype=np.float64) * half**2)) ** 2)


def sign_error(
    x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[Setting]], test_examples: ArrayLike | None
) -> SignError:
    """Return how often a measure is wrong about which of two settings has the larger gap, on average and at worst.

    An environment is a pair of settings that differ in one axis. Its error is the mean of ``(1 - sign(dx) sign(dy)) /
    2`` over all runs of one setting with all runs of the other, weighted by the confidence that the gaps differ; a tie
    of the measure is half an error. Environments without weight are left out. Smaller is better, 0.5 is chance.

    Args:
        x: the measure, one number per run.
        y: the gap of errors, one number per run.
        axes: the setting of each run, by axis.
        test_examples: their number, for all runs or for each; None if gaps are not differences of error rates, so
            that the bound does not apply: then all pairs with different gaps have the same weight.

    Example:
        >>> sign_error([1, 2, 3, 3], [0.1, 0.2, 0.4, 0.3], {"lr": [1, 2, 3, 3]}, 10_000)
        SignError(mean=0.0, p90=0.0, max=0.0, environments=3)
    """
    values, gaps = check_paired_values(x, y)
    layout = GridLayout.from_settings(axes, None, len(values))
    sizes = None if test_examples is None else np.broadcast_to(np.asarray(test_examples, dtype=np.float64), gaps.shape)
    return summarize_sign_error(
        build_environment_means(gaps, layout, sizes, np.arange(len(gaps)), 0).compute_group_means(values)
    )


def build_environment_means(
    y: Floats, layout: GridLayout, test_examples: Floats | None, units: Ints, seed: int
) -> PairMeans:
    """Return all pairs of positive weight, grouped by their two settings; the smaller of two test sets counts."""
    by_axis = _group_by_axis(layout)
    share, none = compute_sample_share(by_axis), np.zeros(0, dtype=np.int64)
    pairs = [(none, none), *(find_pairs_within(groups, codes, share, seed) for groups, codes in by_axis)]
    first, second = (np.concatenate(each) for each in zip(*pairs, strict=True))
    difference = np.abs(y[first] - y[second])
    if test_examples is None:
        weight = (difference > 0).astype(np.float64)
    else:
        weight = hoeffding_weight(difference, np.minimum(test_examples[first], test_examples[second]))
    taken = weight > 0
    first, second, weight = first[taken], second[taken], weight[taken]
    setting = layout.compute_levels(layout.axes)
    a, b = setting[first], setting[second]
    environment = combine_codes([np.minimum(a, b), np.maximum(a, b)], len(a))
    return PairMeans(first, second, environment, weight, y, units, share=share, seed=seed)


def count_environments(layout: GridLayout) -> int:
    """Return how many pairs of settings differ in one axis, whether or not their gaps can be told apart."""
    one_each = layout.select_runs(np.unique(layout.compute_levels(layout.axes), return_index=True)[1].astype(np.int64))
    return sum(count_pairs_within(*each) for each in _group_by_axis(one_each))


def resample_sign_error(environments: PairMeans, x: Floats, times: Counts) -> Floats:
    """Return ``(measures, resamples)``: the mean over the environments in each resample; x is ``(measures, runs)``."""
    return (1 - environments.resample(x, times)) / 2


def summarize_sign_error(agreement: Floats) -> SignError:
    """Return the sign error, given the mean agreement in each environment, from -1 to 1."""
    if not len(agreement):
        return SignError(np.nan, np.nan, np.nan, 0)
    errors = (1 - agreement) / 2
    return SignError(float(errors.mean()), float(np.percentile(errors, 90)), float(errors.max()), len(errors))


def _group_by_axis(layout: GridLayout) -> list[tuple[Ints, Ints]]:
    """Return, for each axis, the settings of all other axes and its own."""
    return [
        (layout.compute_levels(other for other in layout.axes if other != name), codes)
        for name, codes in layout.axes.items()
    ]
