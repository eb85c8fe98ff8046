"""Robust sign-error (Dziugaite et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from saltflat.studies.scores.arrays import Floats, Ints, once, paired, ratio
from saltflat.studies.scores.layout import Layout, joined, pair_draws


@dataclass(frozen=True)
class SignError:
    """Share of wrong orders over the environments; nan where there is no environment.

    Attributes:
        mean, p90, max: over the environments, the 90th percentile between the two nearest.
        environments: how many have weight.
    """

    mean: float
    p90: float
    max: float
    environments: int


@dataclass(frozen=True)
class Environments:
    """Pairs of runs whose settings differ in exactly one axis, by the two settings; and what each pair weighs."""

    first: Ints
    second: Ints
    environment: Ints
    weight: Floats

    @property
    def number(self) -> int:
        return int(self.environment.max()) + 1 if len(self.environment) else 0


def hoeffding_weight(difference: ArrayLike, examples: ArrayLike) -> Floats:
    r"""How sure it is that two gaps differ, from 0 to 1, each known from so many test examples.

    .. math::
        \max(0,\; 1 - 2 e^{-2 n (\Delta / 2)^2})^2

    Example:
        >>> [round(float(each), 3) for each in hoeffding_weight([0.01, 0.02, 0.05], 10_000)]
        [0.0, 0.532, 1.0]
    """
    half = np.asarray(difference, dtype=np.float64) / 2
    return np.asarray(np.maximum(0.0, 1 - 2 * np.exp(-2 * np.asarray(examples, dtype=np.float64) * half**2)) ** 2)


def sign_error(
    x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[object]], test_examples: ArrayLike | None
) -> SignError:
    """How often the measure is wrong about which of two settings has the larger gap, and how often at worst.

    An environment is a pair of settings that differ in one axis. Its error is the mean of ``(1 - sign(dx) sign(dy)) /
    2`` over all runs of the one with all runs of the other, weighted by how sure the test set is that the gaps
    differ; a tie of the measure is half an error. Environments without weight are left out. Smaller is better, a coin
    has 0.5.

    Args:
        x: of the measure, a number per run.
        y: of the gap of errors.
        axes: by name, the setting of each run.
        test_examples: how many there were, for all or for each run; None where gaps are no shares of wrong answers,
            so that this bound says nothing: then all pairs with different gaps weigh the same.

    Example:
        >>> sign_error([1, 2, 3, 3], [0.1, 0.2, 0.4, 0.3], {"lr": [1, 2, 3, 3]}, 10_000)
        SignError(mean=0.0, p90=0.0, max=0.0, environments=3)
    """
    values, gaps = paired(x, y)
    layout = Layout.of(axes, None, len(values))
    sizes = None if test_examples is None else np.broadcast_to(np.asarray(test_examples, dtype=np.float64), gaps.shape)
    return error_of(environment_errors(values, gaps, environments_of(gaps, layout, sizes), once(len(values)))[:, 0])


def environments_of(y: Floats, layout: Layout, test_examples: Floats | None) -> Environments:
    """All pairs that weigh something; the smaller of the two test sets counts."""
    count = len(y)
    apart = np.zeros((count, count), dtype=np.int64)
    for codes in layout.axes.values():
        apart += codes[:, None] != codes[None, :]
    first, second = (each.astype(np.int64) for each in np.nonzero(np.triu(apart == 1, 1)))
    difference = np.abs(y[first] - y[second])
    if test_examples is None:
        weight = (difference > 0).astype(np.float64)
    else:
        weight = hoeffding_weight(difference, np.minimum(test_examples[first], test_examples[second]))
    taken = weight > 0
    first, second, weight = first[taken], second[taken], weight[taken]
    setting = layout.level(layout.axes)
    a, b = setting[first], setting[second]
    return Environments(first, second, joined([np.minimum(a, b), np.maximum(a, b)], len(a)), weight)


def environment_errors(x: Floats, y: Floats, environments: Environments, draws: Floats) -> Floats:
    """``(environments, resamples)``; nan where none of an environment's pairs was drawn."""
    first, second = environments.first, environments.second
    kind, count = pair_draws(draws, first, second)
    wrong = (1 - np.sign(x[first] - x[second]) * np.sign(y[first] - y[second])) / 2
    where, shape = (environments.environment, kind), (environments.number, len(count))
    return ratio(
        csr_array((environments.weight * wrong, where), shape=shape) @ count,
        csr_array((environments.weight, where), shape=shape) @ count,
    )


def drawn_sign_error(errors: Floats) -> Floats:
    """The mean over the environments in each resample."""
    known = ~np.isnan(errors)
    return ratio(np.where(known, errors, 0.0).sum(0), known.sum(0))


def error_of(errors: Floats) -> SignError:
    """Of environments that all have weight."""
    if not len(errors):
        return SignError(np.nan, np.nan, np.nan, 0)
    return SignError(float(errors.mean()), float(np.percentile(errors, 90)), float(errors.max()), len(errors))
