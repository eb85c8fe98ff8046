"""The Hessian's diagonal by random finite differences of the gradient (Tsuzuku et al., 2020, equations 29 to 31)."""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.amounts import check_count, check_positive
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.noise import draw_signs
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic
from saltflat.whole import (
    Weights,
    check_symmetric,
    compute_gradient_at,
    compute_hessian_product,
    compute_moved_weights,
    compute_norm,
    compute_scales,
)

KINDS = ("corrected", "printed", "hutchinson")


@statistic(
    per="layer",
    meaning="Diagonal of the Hessian, estimated from differences of gradients; may be negative.",
    passes=lambda draws, **_: 6 * draws,
)
def finite_difference(
    setting: Setting, *, kind: str = "corrected", step: float = 1e-2, epsilon: float = 0.0, draws: int = 10
) -> StatisticResult:
    r"""The mean over random signs s of :math:`s \circ (\nabla L(w + r D s) - \nabla L(w - r D s)) / (2 r D)`.

    With :math:`D = |w| + \epsilon` this is unbiased up to the step (``"corrected"``). As printed, :math:`\epsilon` is
    not multiplied by s, and the mean is :math:`H_{ii} |w_i| / (|w_i| + \epsilon)` (``"printed"``). ``"hutchinson"`` is
    the limit of small steps with D = 1, :math:`s \circ H s`, by differentiating twice.

    Args:
        setting: what is measured.
        kind: one of the three.
        step: r, relative to the weights.
        epsilon: what is added to the size of the weights; only without it is the estimate independent of their scale.
        draws: how many signs; at least 2.
    """
    if kind not in KINDS:
        raise make_unknown_name_error("kind of estimate", kind, KINDS)
    check_positive(step=step)
    check_count(2, draws=draws)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < float("inf"):
        raise OptionError(f"Got epsilon={epsilon!r}. Want at least 0. Do: leave it out for 0.")
    each = []
    for draw in range(draws):
        each.append(estimate_diagonal_once(setting, draw_signs(setting, draw), kind, step, epsilon))
        setting.tick("Differences of gradients", draw + 1, draws)
    if kind == "hutchinson":
        _check_products_symmetric(setting, each)
    sums = {name: torch.stack([one[name] for one in each]).sum(0) for name in each[0]}
    replicates = tuple({name: (sums[name] - one[name]) / (draws - 1) for name in sums} for one in each)
    zeros = 0
    if kind != "hutchinson" and epsilon == 0:
        zeros = sum(int((value == 0).sum()) for value in setting.problem.network.measured.values())
    note = f"{zeros} parameters are zero and were not moved: their curvature is given as zero."
    mean = {name: total / draws for name, total in sums.items()}
    return StatisticResult(mean, replicates, exact=False, notes=(note,) if zeros else ())


def estimate_diagonal_once(setting: Setting, s: Weights, kind: str, step: float, epsilon: float) -> dict[str, Tensor]:
    """The estimate from one choice of signs."""
    if kind == "hutchinson":
        product = compute_hessian_product(setting, s)
        return {name: s[name] * product[name] for name in product}
    scales = compute_scales(setting)
    size = {name: each + epsilon for name, each in scales.items()}
    extra = {name: s[name] * epsilon if kind == "corrected" else epsilon for name in s}
    move = {name: step * (each * s[name] + extra[name]) for name, each in scales.items()}
    _, there = compute_gradient_at(setting, compute_moved_weights(setting, move))
    _, back = compute_gradient_at(setting, compute_moved_weights(setting, {name: -each for name, each in move.items()}))
    found = {name: s[name] * (there[name] - back[name]) / (2 * step * size[name]) for name in s}
    return {name: each.where(size[name] > 0, torch.zeros_like(each)) for name, each in found.items()}


def _check_products_symmetric(setting: Setting, each: list[dict[str, Tensor]]) -> None:
    """The products with two choices of signs, which s o Hs gives back, must be those of a symmetric matrix."""
    u, v = draw_signs(setting, 0), draw_signs(setting, 1)
    Hu, Hv = ({name: s[name] * one[name] for name in s} for s, one in zip((u, v), each, strict=False))
    off = sum(float((u[name] * Hv[name]).sum() - (v[name] * Hu[name]).sum()) for name in u)
    size = compute_norm(u) * (compute_norm(Hu) + compute_norm(Hv))
    check_symmetric(setting, abs(off) / size if size else 0.0)
