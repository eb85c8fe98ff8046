"""How much the loss can rise within a ball around the weights: a search, so a lower bound."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from saltflat.amounts import check_count, check_positive
from saltflat.noise import draw_normals
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic
from saltflat.whole import (
    Weights,
    check_finite_loss,
    compute_gradient_at,
    compute_moved_weights,
    compute_norm,
    compute_scales,
)


@statistic(
    per="network",
    meaning="Largest rise of the loss that was found within a ball around the weights.",
    passes=lambda steps, **_: 3 * steps,
)
def worst_rise(setting: Setting, *, radius: float = 0.05, steps: int = 20, adaptive: bool = True) -> StatisticResult:
    r"""The largest L(w + d) - L(w) found with :math:`|d / c|_2 \le \rho`; c is \|w\|, or 1 if not ``adaptive``.

    Projected ascent in the coordinates u = d / c. The first step leads to SAM's (or ASAM's) point; a step that raises
    the loss is followed by a longer one, which makes it a power iteration where the surface is convex, and one that
    does not is taken back and tried shorter.

    Args:
        setting: what is measured.
        radius: :math:`\rho`.
        steps: how many gradients to take.
        adaptive: whether the ball is measured relative to the weights.

    Returns:
        ``value``; ``first_step``, the rise at SAM's point; ``slope``, the length of the gradient in u; and ``gap``,
        what the slope at the point found still promises within the ball, relative to the value: 0 at a maximum.
    """
    check_positive(radius=radius)
    check_count(1, steps=steps)
    scales = compute_scales(setting)
    if not adaptive:
        scales = {name: torch.ones_like(each) for name, each in scales.items()}

    def compute_loss_and_gradient(u: Weights) -> tuple[float, dict[str, Tensor]]:
        loss, gradient = compute_gradient_at(
            setting, compute_moved_weights(setting, {name: scales[name] * u[name] for name in u})
        )
        return loss, {name: scales[name] * each for name, each in gradient.items()}

    u = {name: torch.zeros_like(each) for name, each in scales.items()}
    here, uphill = compute_loss_and_gradient(u)
    best = check_finite_loss(here)
    slope, first = compute_norm(uphill), 0.0
    # At a minimum the slope is rounding: any direction serves to start from, provided that it is not a special one.
    if slope * radius <= 1e-12 * max(abs(here), 1e-12):
        uphill = draw_normals(setting, 0)
    step = radius
    for number in range(steps):
        length = compute_norm(uphill)
        if length == 0:
            break
        tried = _project_into_ball({name: u[name] + (step / length) * uphill[name] for name in u}, radius)
        loss, there = compute_loss_and_gradient(tried)
        if number == 0:
            first = loss - here
        if best < loss < inf:
            u, best, uphill, step = tried, loss, there, 2 * step
        else:
            step /= 4
        setting.tick("Search for the largest rise", number + 1, steps)
    rise = max(best - here, 0.0)
    promised = radius * compute_norm(uphill) - sum(float((uphill[name] * u[name]).sum()) for name in u)
    gap = max(promised, 0.0) / rise if rise > 0 else 0.0
    note = "The largest rise found by a search within the ball: a lower bound of the largest there is."
    found = {"value": rise, "first_step": first, "slope": slope, "gap": gap}
    return StatisticResult(found, exact=False, notes=(note,))


def _project_into_ball(u: Weights, radius: float) -> dict[str, Tensor]:
    """The nearest point of the ball."""
    shrink = min(1.0, radius / compute_norm(u))
    return {name: shrink * each for name, each in u.items()}
