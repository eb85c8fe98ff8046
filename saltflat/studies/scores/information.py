"""Conditional mutual information (Jiang et al., 2020), and the score of the PGDL competition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from saltflat.studies.scores.layout import Counts, Floats, GridLayout, Setting, check_paired_values, divide_or_nan
from saltflat.studies.scores.sign_tables import (
    HajekProjection,
    PairSigns,
    Partition,
    SignTables,
    build_partitions,
    compute_entropies,
    count_tables,
    mirror_signs,
    resample_tables,
)


@dataclass(frozen=True)
class ConditionalInformation:
    """The minimum over the sets of axes, and each set (``"lr + batch"``, ``""`` for none); nan if the settings
    determine the order of the gaps."""

    least: float
    by_set: dict[str, float]


def conditional_information(
    x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[Setting]]
) -> ConditionalInformation:
    r"""Return how much a measure's order of two runs tells about the gap's order beyond the settings, from 0 to 1.

    .. math::
        K = \min_{|S| \le 2} \frac{I(V_\mu; V_g \mid U_S)}{H(V_g \mid U_S)}

    over all ordered pairs of different runs: :math:`V` is the sign of the difference, with a tie a third value, and
    :math:`U_S` the settings of both runs in the axes :math:`S`. Averages over :math:`U_S` are weighted by its
    probability. A measure that only follows one or two axes tells nothing once these are known. The sign of the
    relation does not matter: an anti-correlated measure tells as much. A set that determines the gap's order is left
    out.

    Example:
        >>> lr, gap = [1, 1, 2, 2], [1, 2, 3, 4]
        >>> conditional_information(lr, gap, {"lr": lr}).by_set["lr"]
        0.0
        >>> conditional_information(gap, gap, {"lr": lr}).least
        1.0
    """
    values, gaps = check_paired_values(x, y)
    partitions = build_partitions(GridLayout.from_settings(axes, None, len(values)))
    signs = PairSigns(values, gaps)
    by_set = {name: float(resample_information(signs, each)[0][0]) for name, each in partitions.items()}
    return ConditionalInformation(float(find_least(by_set)), by_set)


def resample_information(
    signs: PairSigns, partition: Partition, times: Counts | None = None, *, projected: bool = False
) -> tuple[Floats, Floats]:
    """Return conditional information and its competition form for one set of axes: of all runs, then each resample.

    Args:
        signs: the signs of the measure and the gap.
        partition: the runs grouped by their settings.
        times: ``(runs, resamples)``, how often each resample contains each run; no resamples if None.
        projected: whether to approximate resamples by a projection, for many runs.
    """
    whole, drawn = InformationSums(1), InformationSums(0 if times is None else times.shape[1])
    projection = HajekProjection(signs, partition, times) if times is not None and projected else None
    for columns in partition.iter_columns():
        counts = signs.count_by_level(partition, columns)
        whole.add(count_tables(signs, partition, columns, counts))
        if projection is not None:
            projection.add(columns, counts)
    if projection is not None:
        drawn.extend(projection.iter_tables())
    elif times is not None:
        drawn.extend(resample_tables(signs, partition, times))
    paper, competition = (
        np.concatenate(each) for each in zip(whole.compute_scores(), drawn.compute_scores(), strict=True)
    )
    return paper, competition


class InformationSums:
    """Sum the contributions of cells to the two scores, in each resample."""

    def __init__(self, resamples: int) -> None:
        self._paper, self._competition = np.zeros((2, resamples)), np.zeros((2, resamples))

    def add(self, tables: SignTables) -> None:
        """Add the contributions of some cells."""
        shared, entropy, _ = compute_entropies(tables.counts)
        # A cell of two different settings counts twice: its mirror image contributes the same.
        twice = np.where(tables.same, 1.0, 2.0)
        self._paper += twice @ shared, twice @ entropy
        self._competition += _compute_competition_sums(tables)

    def extend(self, tables: Iterable[SignTables]) -> None:
        """Add the contributions of several tables."""
        for each in tables:
            self.add(each)

    def compute_scores(self) -> tuple[Floats, Floats]:
        """Return conditional information and its competition form."""
        return divide_or_nan(*self._paper), 100 * divide_or_nan(*self._competition)


def _compute_competition_sums(tables: SignTables) -> Floats:
    """Return information and entropy per pair, where signs are "larger" or "not larger"; a run is paired with itself,
    which is two ties, but not with its other copies."""
    counts, apart = tables.counts.copy(), ~tables.same
    counts[tables.same, 1, 1] += tables.runs[tables.same]
    counts = np.concatenate([counts, mirror_signs(counts[apart])])
    counts = np.stack([counts[:, 0] + counts[:, 1], counts[:, 2]], 1)
    counts = np.stack([counts[:, :, 0] + counts[:, :, 1], counts[:, :, 2]], 2)
    shared, entropy, total = compute_entropies(counts)
    # The number of combinations cancels, so those that do not occur are not counted.
    return np.stack(
        [np.divide(each, total, out=np.zeros_like(each), where=total > 0).sum(0) for each in (shared, entropy)]
    )


def find_least(by_set: Mapping[str, ArrayLike]) -> Floats:
    """Return the minimum over the sets that have a value; nan if none has."""
    return np.asarray(np.fmin.reduce(np.array(list(by_set.values()), dtype=np.float64)), dtype=np.float64)


def pgdl(x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[Setting]]) -> float:
    """Return conditional mutual information as the PGDL competition scored one task (here the study), from 0 to 100.

    It differs from the paper's form: a pair is larger or not larger, so a tie counts as not larger; every run is
    also paired with itself; only sets of exactly two axes are used (of one if there is only one); and every
    combination of settings that occurs has the same weight. On a complete grid without ties and many runs the two are
    close. nan if the settings determine the gap's order.

    Example:
        >>> axes = {"lr": [1, 1, 2, 2, 1, 1, 2, 2], "batch": [8, 16] * 4}
        >>> gap = [1, 2, 3, 4, 8, 7, 6, 5]
        >>> pgdl(gap, gap, axes), pgdl(axes["lr"], gap, axes)
        (100.0, 0.0)
    """
    values, gaps = check_paired_values(x, y)
    partitions = build_partitions(GridLayout.from_settings(axes, None, len(values)), 2)
    signs = PairSigns(values, gaps)
    return float(find_least({name: resample_information(signs, each)[1] for name, each in partitions.items()})[0])
