"""The largest eigenvalue of the true Hessian of the whole network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltflat.amounts import check_positive
from saltflat.errors import make_unknown_name_error
from saltflat.lanczos import TopEigenvalue, Vectors, find_top_eigenvalues, get_rounding_tolerance, reserve_basis
from saltflat.noise import draw_normals
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic
from saltflat.whole import check_symmetric, compute_grouped_curvature, compute_hessian_product


@statistic(per="network", meaning="Largest eigenvalue of the Hessian of the mean loss over all parameters.", passes=90)
def hessian_top(setting: Setting, *, scaled: str = "none", tolerance: float | None = None) -> StatisticResult:
    r"""The largest eigenvalue of H, or of :math:`D^{1/2} H D^{1/2}` with :math:`D = |W_l|^2` for every parameter.

    Args:
        setting: what is measured.
        scaled: ``"none"`` or ``"quotient"``.
        tolerance: of the bound on the eigenvalue's error, relative; what the precision allows if None.

    Returns:
        ``value``; ``residual``, the distance of Hv from its multiple of v relative to it; ``bound``, how far the
        eigenvalue may be off, relative; ``products`` with the Hessian; and ``converged``.
    """
    tolerance = get_rounding_tolerance(setting) if tolerance is None else tolerance
    check_positive(tolerance=tolerance)
    measured = setting.problem.network.measured
    if scaled not in ("none", "quotient"):
        raise make_unknown_name_error("scaling", scaled, ("none", "quotient"))
    roots = {name: each.double().norm() if scaled == "quotient" else 1.0 for name, each in measured.items()}
    sizes = [each.numel() for each in measured.values()]
    done = 0

    def multiply_hessian(vector: Tensor) -> Tensor:
        nonlocal done
        parts = zip(measured.items(), vector.split(sizes), strict=True)
        found = compute_hessian_product(
            setting, {name: roots[name] * part.reshape(each.shape) for (name, each), part in parts}
        )
        done += 1
        setting.tick("Largest eigenvalue of the Hessian", done, None)
        return torch.cat([(roots[name] * each).flatten() for name, each in found.items()])

    start = torch.cat([each.flatten() for each in draw_normals(setting, 0).values()])
    moved: list[Tensor] = []

    def multiply_and_record(vectors: Vectors) -> Vectors:
        moved.append(multiply_hessian(vectors[""]))
        del moved[1:-1]  # the first is kept for the check, the last is on its way
        return {"": moved[-1]}

    with reserve_basis(setting, measured) as basis:
        top = find_top_eigenvalues(multiply_and_record, {"": start}, tolerance, basis=basis)[""]
    check_symmetric(
        setting, _compute_asymmetry(start / start.norm(), moved[0], top.vector, multiply_hessian(top.vector))
    )
    notes = () if top.converged else (f"The Hessian's eigenvalue may be larger by {top.bound:.1e} of itself.",)
    found = {
        "value": top.value,
        "residual": top.residual,
        "bound": top.bound,
        "products": done,
        "converged": top.converged,
    }
    scaled_vector = {
        name: roots[name] * part.reshape(each.shape)
        for (name, each), part in zip(measured.items(), top.vector.split(sizes), strict=True)
    }
    # To first order the eigenvalue moves as v' H v does with the vector as it is.
    left_out = compute_grouped_curvature(setting, scaled_vector).make_leave_one_out() if setting.groups else None
    without = None if left_out is None else lambda group: {**found, "value": left_out(group)}
    return StatisticResult(found, notes=notes, without=without)


def find_top_eigenvalue(operator: Any, start: Any, tolerance: float = 1e-9) -> TopEigenvalue:
    """The largest eigenvalue of any symmetric operator, which need not be the largest in size.

    Args:
        operator: anything with a ``shape`` that can be multiplied with a vector by ``@``, such as SciPy's or another
            library's linear operators.
        start: vector to start from.
        tolerance: of the bound on the eigenvalue's error, relative.

    >>> top = find_top_eigenvalue(np.diag([-5.0, 3.0, 1.0]), np.ones(3))
    >>> round(top.value, 9), top.vector.abs().round(decimals=9).tolist()
    (3.0, [0.0, 1.0, 0.0])
    """

    def multiply_operator(vectors: Vectors) -> Vectors:
        return {"": torch.as_tensor(np.asarray(operator @ vectors[""].numpy(), dtype=np.float64))}

    return find_top_eigenvalues(
        multiply_operator, {"": torch.as_tensor(np.asarray(start, dtype=np.float64))}, tolerance
    )[""]


def _compute_asymmetry(u: Tensor, Hu: Tensor, v: Tensor, Hv: Tensor) -> float:
    """How much u'Hv and v'Hu differ, relative to the lengths of the products."""
    size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
    return float((u @ Hv - v @ Hu).abs()) / size if size else 0.0
