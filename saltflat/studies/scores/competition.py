"""The score of the PGDL competition (NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numpy.typing import ArrayLike

from saltflat.studies.scores.arrays import check_paired_values
from saltflat.studies.scores.information import find_least, resample_information
from saltflat.studies.scores.layout import GridLayout
from saltflat.studies.scores.sign_tables import PairSigns, build_partitions


def pgdl(x: ArrayLike, y: ArrayLike, axes: Mapping[str, Sequence[object]]) -> float:
    """Conditional mutual information as the competition scored it, from 0 to 100; of one task, here the study.

    It differs from the paper's form: a pair is larger or not larger, so a tie counts as not larger; every run is
    also paired with itself; only sets of exactly two axes are looked at (of one where there is but one); and every
    combination of settings that occurs weighs the same. On a complete grid without ties and many runs the two are
    close. nan where the gap's order is certain once the settings are known.

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
