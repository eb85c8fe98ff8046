"""The true Hessian and its eigenvalues: largest ones per weight and of the network, diagonal by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saltflat.engine.context import Context, StatisticResult, find_geometries
from saltflat.engine.eigenvalues import (
    compute_curvature_replicates,
    draw_start_vectors,
    get_rounding_tolerance,
    make_block_product,
    reserve_basis,
)
from saltflat.engine.full_loss import (
    Weights,
    check_symmetric,
    compute_gradient_at,
    compute_grouped_curvature,
    compute_hessian_product,
    compute_moved_weights,
    compute_norm,
    compute_scales,
)
from saltflat.engine.lanczos import TopEigenvalue, Vectors, find_top_eigenvalues
from saltflat.engine.noise import draw_normals, draw_signs
from saltflat.engine.statistic import ParameterSite, Statistic, statistic
from saltflat.engine.sweep import Sweep
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.gradients.base import FactoredGradient
from saltflat.validation import check_count, check_positive


@statistic(per="network", meaning="Largest eigenvalue of the Hessian of the mean loss over all parameters.", passes=90)
def hessian_top(context: Context, *, scaled: str = "none", tolerance: float | None = None) -> StatisticResult:
    r"""Find the largest eigenvalue of H, or of :math:`D^{1/2} H D^{1/2}` with :math:`D = |W_l|^2` for every parameter.

    Args:
        context: what is measured.
        scaled: ``"none"`` or ``"quotient"``.
        tolerance: of the bound on the eigenvalue's error, relative; what the precision allows if None.

    Returns:
        ``value``; ``residual``, the distance of Hv from its multiple of v relative to it; ``bound``, how far the
        eigenvalue may be off, relative; ``products`` with the Hessian; and ``converged``.
    """
    tolerance = get_rounding_tolerance(context) if tolerance is None else tolerance
    check_positive(tolerance=tolerance)
    measured = context.problem.network.measured
    if scaled not in ("none", "quotient"):
        raise make_unknown_name_error("scaling", scaled, ("none", "quotient"))
    roots = {name: each.double().norm() if scaled == "quotient" else 1.0 for name, each in measured.items()}
    sizes = [each.numel() for each in measured.values()]
    done = 0

    def multiply_hessian(vector: Tensor) -> Tensor:
        nonlocal done
        parts = zip(measured.items(), vector.split(sizes), strict=True)
        found = compute_hessian_product(
            context, {name: roots[name] * part.reshape(each.shape) for (name, each), part in parts}
        )
        done += 1
        context.tick("Largest eigenvalue of the Hessian", done, None)
        return torch.cat([(roots[name] * each).flatten() for name, each in found.items()])

    start = torch.cat([each.flatten() for each in draw_normals(context, 0).values()])
    moved: list[Tensor] = []

    def multiply_and_record(vectors: Vectors) -> Vectors:
        moved.append(multiply_hessian(vectors[""]))
        del moved[1:-1]  # the first is kept for the check, the last is on its way
        return {"": moved[-1]}

    with reserve_basis(context, measured) as basis:
        top = find_top_eigenvalues(multiply_and_record, {"": start}, tolerance, basis=basis)[""]
    check_symmetric(
        context, _compute_asymmetry(start / start.norm(), moved[0], top.vector, multiply_hessian(top.vector))
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
    left_out = compute_grouped_curvature(context, scaled_vector).make_leave_one_out() if context.groups else None
    without = None if left_out is None else lambda group: {**found, "value": left_out(group)}
    return StatisticResult(found, notes=notes, without=without)


def find_top_eigenvalue(operator: Any, start: Any, tolerance: float = 1e-9) -> TopEigenvalue:
    """Find the largest eigenvalue of a symmetric operator, which need not be the largest in size.

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
    """Return how much u'Hv and v'Hu differ, relative to the lengths of the products."""
    size = float((Hu.square().sum() + Hv.square().sum()).sqrt())
    return float((u @ Hv - v @ Hu).abs()) / size if size else 0.0


@statistic(per="layer", meaning="How fast the mean loss bends along the worst direction of a weight.", passes=100)
def top_eigenvalue(context: Context, *, tolerance: float | None = None, steps: int = 500) -> StatisticResult:
    """Return ``(5,)`` for each weight: the eigenvalue, its relative residual, the bound on its error, steps, converged.

    ``tolerance`` is of that bound; what the precision allows if None.
    """
    check_count(1, steps=steps)
    tolerance = get_rounding_tolerance(context) if tolerance is None else tolerance
    check_positive(tolerance=tolerance)
    names = find_geometries(context.problem.network)
    starts = draw_start_vectors(context, names)
    with reserve_basis(context, names) as basis:
        tops = find_top_eigenvalues(
            make_block_product(context),
            starts,
            tolerance,
            steps,
            lambda done, total: context.tick("Largest eigenvalues of the layers", done, total),
            basis,
        )

    def make_row(value: float | Tensor, name: str) -> Tensor:
        top = tops[name]
        return torch.tensor([float(value), top.residual, top.bound, top.steps, top.converged], dtype=torch.float64)

    replicates = None
    if context.plan.is_random:
        found = compute_curvature_replicates(context, {name: top.vector for name, top in tops.items()})
        replicates = tuple({name: make_row(each[name], name) for name in names} for each in found or ()) or None
    silent = [name for name, top in tops.items() if top.value == 0]
    notes = (f"no curvature at all in {', '.join(silent[:4])}{' and others' * (len(silent) > 4)}",) if silent else ()
    if context.plan.is_random:
        notes = (*notes, "random columns bias a largest eigenvalue upwards: it picks out what is large by chance")
    return StatisticResult(
        {name: make_row(top.value, name) for name, top in tops.items()},
        replicates,
        exact=not context.plan.is_random,
        notes=notes,
        without=_make_leave_out(context, {name: top.vector for name, top in tops.items()}, make_row),
    )


def _make_leave_out(
    context: Context, vectors: Mapping[str, Tensor], row: Callable[[float | Tensor, str], Tensor]
) -> Callable[[int], dict[str, Tensor]] | None:
    """Make a function for the eigenvalues without one group of examples, to first order: v' G v with fixed vectors."""
    if context.groups is None:
        return None

    def sum_curvature(form: FactoredGradient, site: ParameterSite) -> Tensor:
        return form.project(vectors[site.name].to(site.value)).double().square().sum()

    along = Statistic("along", of="curvature", total=sum_curvature, spread=None, meaning="v' G v", kind="scalar")
    left_out = Sweep(context, [along], only=vectors.keys(), groups=context.groups).run().make_leave_one_out(along)
    if left_out is None:
        return None
    return lambda group: {name: row(value, name) for name, value in left_out(group).items()}


KINDS = ("corrected", "printed", "gaussian", "hutchinson")
# Relative to the weights, for random signs.
STEP = 1e-2
# Of every weight alike. In float32 steps of 1e-3 are good to 6e-5 on weights up to 1, and those of the paper's authors,
# 1e-5, only to 6e-3; the difference of gradients loses as many digits again.
GAUSSIAN_STEP = 1e-3


@statistic(
    per="layer",
    meaning="Diagonal of the Hessian, estimated from differences of gradients; may be negative.",
    passes=lambda draws, **_: 6 * draws,
)
def finite_difference(
    context: Context, *, kind: str = "corrected", step: float | None = None, epsilon: float = 0.0, draws: int = 10
) -> StatisticResult:
    r"""Return the mean over random signs s of :math:`s \circ (\nabla L(w + r D s) - \nabla L(w - r D s)) / (2 r D)`.

    With :math:`D = |w| + \epsilon` this is unbiased up to the step (``"corrected"``). As printed, :math:`\epsilon` is
    not multiplied by s, and the mean is :math:`H_{ii} |w_i| / (|w_i| + \epsilon)` (``"printed"``). ``"hutchinson"`` is
    the limit of small steps with D = 1, :math:`s \circ H s`, by differentiating twice.

    ``"gaussian"`` is that of the paper's first version: D = 1, and standard normal numbers in place of the signs, which
    is unbiased up to the step, too. Its step is not relative to the weights, so it depends on their scale.

    Args:
        context: what is measured.
        kind: one of the four.
        step: r, relative to the weights (1e-2 if None), or of every weight alike for ``"gaussian"`` (1e-3 if None).
        epsilon: what is added to the size of the weights; only without it is the estimate independent of their scale.
            ``"gaussian"`` has none.
        draws: how many random directions; at least 2.
    """
    if kind not in KINDS:
        raise make_unknown_name_error("kind of estimate", kind, KINDS)
    step = (GAUSSIAN_STEP if kind == "gaussian" else STEP) if step is None else step
    check_positive(step=step)
    check_count(2, draws=draws)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < float("inf"):
        raise OptionError(f"Expected at least 0, but got epsilon={epsilon!r}. Try leaving it out for 0.")
    if kind == "gaussian" and epsilon:
        raise OptionError(
            f"Expected no epsilon with kind='gaussian', whose steps do not depend on the weights, but got "
            f"epsilon={epsilon!r}. Try leaving it out, or kind='corrected'."
        )
    draw_direction = draw_normals if kind == "gaussian" else draw_signs
    each = []
    for draw in range(draws):
        each.append(estimate_diagonal_once(context, draw_direction(context, draw), kind, step, epsilon))
        context.tick("Differences of gradients", draw + 1, draws)
    if kind == "hutchinson":
        _check_products_symmetric(context, each)
    sums = {name: torch.stack([one[name] for one in each]).sum(0) for name in each[0]}
    replicates = tuple({name: (sums[name] - one[name]) / (draws - 1) for name in sums} for one in each)
    zeros = 0
    if kind in ("corrected", "printed") and epsilon == 0:
        zeros = sum(int((value == 0).sum()) for value in context.problem.network.measured.values())
    note = f"{zeros} parameters are zero and were not moved: their curvature is given as zero."
    mean = {name: total / draws for name, total in sums.items()}
    return StatisticResult(mean, replicates, exact=False, notes=(note,) if zeros else ())


def estimate_diagonal_once(context: Context, s: Weights, kind: str, step: float, epsilon: float) -> dict[str, Tensor]:
    """Return the estimate from one draw: of signs, or of normal numbers for ``"gaussian"``."""
    if kind == "hutchinson":
        product = compute_hessian_product(context, s)
        return {name: s[name] * product[name] for name in product}
    scales = compute_scales(context)
    if kind == "gaussian":
        scales = {name: torch.ones_like(each) for name, each in scales.items()}
    size = {name: each + epsilon for name, each in scales.items()}
    extra = {name: s[name] * epsilon if kind == "corrected" else epsilon for name in s}
    move = {name: step * (each * s[name] + extra[name]) for name, each in scales.items()}
    _, there = compute_gradient_at(context, compute_moved_weights(context, move))
    _, back = compute_gradient_at(context, compute_moved_weights(context, {name: -each for name, each in move.items()}))
    found = {name: s[name] * (there[name] - back[name]) / (2 * step * size[name]) for name in s}
    return {name: each.where(size[name] > 0, torch.zeros_like(each)) for name, each in found.items()}


def _check_products_symmetric(context: Context, each: list[dict[str, Tensor]]) -> None:
    """Check that the products with two draws of signs are those of a symmetric matrix."""
    u, v = draw_signs(context, 0), draw_signs(context, 1)
    Hu, Hv = ({name: s[name] * one[name] for name in s} for s, one in zip((u, v), each, strict=False))
    off = sum(float((u[name] * Hv[name]).sum() - (v[name] * Hu[name]).sum()) for name in u)
    size = compute_norm(u) * (compute_norm(Hu) + compute_norm(Hv))
    check_symmetric(context, abs(off) / size if size else 0.0)
