"""The largest eigenvalue of every weight's block of the curvature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from saltflat.amounts import check_count, check_positive
from saltflat.forms import FactoredGradient
from saltflat.geometry import find_geometries
from saltflat.lanczos import (
    compute_curvature_replicates,
    draw_start_vectors,
    find_top_eigenvalues,
    get_rounding_tolerance,
    make_block_product,
    reserve_basis,
)
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import ParameterSite, Statistic, statistic
from saltflat.totals import SweepTotals


@statistic(per="layer", meaning="How fast the mean loss bends along the worst direction of a weight.", passes=100)
def top_eigenvalue(setting: Setting, *, tolerance: float | None = None, steps: int = 500) -> StatisticResult:
    """``(5,)`` for each weight: the eigenvalue, its relative residual, the bound on its error, steps, converged.

    ``tolerance`` is of that bound; what the precision allows if None.
    """
    check_count(1, steps=steps)
    tolerance = get_rounding_tolerance(setting) if tolerance is None else tolerance
    check_positive(tolerance=tolerance)
    names = find_geometries(setting.problem.network)
    starts = draw_start_vectors(setting, names)
    with reserve_basis(setting, names) as basis:
        tops = find_top_eigenvalues(
            make_block_product(setting),
            starts,
            tolerance,
            steps,
            lambda done, total: setting.tick("Largest eigenvalues of the layers", done, total),
            basis,
        )

    def make_row(value: float | Tensor, name: str) -> Tensor:
        top = tops[name]
        return torch.tensor([float(value), top.residual, top.bound, top.steps, top.converged], dtype=torch.float64)

    replicates = None
    if setting.plan.is_random:
        found = compute_curvature_replicates(setting, {name: top.vector for name, top in tops.items()})
        replicates = tuple({name: make_row(each[name], name) for name in names} for each in found or ()) or None
    silent = [name for name, top in tops.items() if top.value == 0]
    notes = (f"no curvature at all in {', '.join(silent[:4])}{' and others' * (len(silent) > 4)}",) if silent else ()
    if setting.plan.is_random:
        notes = (*notes, "random columns bias a largest eigenvalue upwards: it picks out what is large by chance")
    return StatisticResult(
        {name: make_row(top.value, name) for name, top in tops.items()},
        replicates,
        exact=not setting.plan.is_random,
        notes=notes,
        without=_make_leave_out(setting, {name: top.vector for name, top in tops.items()}, make_row),
    )


def _make_leave_out(
    setting: Setting, vectors: Mapping[str, Tensor], row: Callable[[float | Tensor, str], Tensor]
) -> Callable[[int], dict[str, Tensor]] | None:
    """The eigenvalues with one group of examples left out, to first order: v' G v with the vectors as they are."""
    if setting.groups is None:
        return None

    def sum_curvature(form: FactoredGradient, site: ParameterSite) -> Tensor:
        return form.project(vectors[site.name].to(site.value)).double().square().sum()

    along = Statistic("along", of="curvature", total=sum_curvature, spread=None, meaning="v' G v", kind="scalar")
    left_out = (
        SweepTotals(setting, [along], only=vectors.keys(), groups=setting.groups).sweep().make_leave_one_out(along)
    )
    if left_out is None:
        return None
    return lambda group: {name: row(value, name) for name, value in left_out(group).items()}
