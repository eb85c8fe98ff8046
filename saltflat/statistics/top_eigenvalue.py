"""The largest eigenvalue of every weight's block of the curvature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from saltflat.amounts import check_count, check_positive
from saltflat.forms import Form
from saltflat.geometry import geometries
from saltflat.lanczos import block_products, curvature_along, room_for_basis, rounding, start_vectors, top_eigenvalues
from saltflat.setting import Found, Setting
from saltflat.statistics import Site, Statistic, statistic
from saltflat.totals import Totals


@statistic(per="layer", meaning="How fast the mean loss bends along the worst direction of a weight.", passes=100)
def top_eigenvalue(setting: Setting, *, tolerance: float | None = None, steps: int = 500) -> Found:
    """``(5,)`` for each weight: the eigenvalue, its relative residual, the bound on its error, steps, converged.

    ``tolerance`` is of that bound; what the precision allows if None.
    """
    check_count(1, steps=steps)
    tolerance = rounding(setting) if tolerance is None else tolerance
    check_positive(tolerance=tolerance)
    names = geometries(setting.problem.network)
    starts = start_vectors(setting, names)
    with room_for_basis(setting, names) as basis:
        tops = top_eigenvalues(
            block_products(setting),
            starts,
            tolerance,
            steps,
            lambda done, total: setting.tick("Largest eigenvalues of the layers", done, total),
            basis,
        )

    def row(value: float | Tensor, name: str) -> Tensor:
        top = tops[name]
        return torch.tensor([float(value), top.residual, top.bound, top.steps, top.converged], dtype=torch.float64)

    replicates = None
    if setting.plan.random:
        found = curvature_along(setting, {name: top.vector for name, top in tops.items()})
        replicates = tuple({name: row(each[name], name) for name in names} for each in found or ()) or None
    silent = [name for name, top in tops.items() if top.value == 0]
    notes = (f"no curvature at all in {', '.join(silent[:4])}{' and others' * (len(silent) > 4)}",) if silent else ()
    if setting.plan.random:
        notes = (*notes, "random columns bias a largest eigenvalue upwards: it picks out what is large by chance")
    return Found(
        {name: row(top.value, name) for name, top in tops.items()},
        replicates,
        exact=not setting.plan.random,
        notes=notes,
        without=_without(setting, {name: top.vector for name, top in tops.items()}, row),
    )


def _without(
    setting: Setting, vectors: Mapping[str, Tensor], row: Callable[[float | Tensor, str], Tensor]
) -> Callable[[int], dict[str, Tensor]] | None:
    """The eigenvalues with one group of examples left out, to first order: v' G v with the vectors as they are."""
    if setting.groups is None:
        return None

    def total(form: Form, site: Site) -> Tensor:
        return form.project(vectors[site.name].to(site.value)).double().square().sum()

    along = Statistic("along", of="curvature", total=total, spread=None, meaning="v' G v", kind="scalar")
    left_out = Totals(setting, [along], only=vectors.keys(), groups=setting.groups).sweep().without(along)
    if left_out is None:
        return None
    return lambda group: {name: row(value, name) for name, value in left_out(group).items()}
