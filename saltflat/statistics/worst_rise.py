"""How much the loss can rise within a ball around the weights: a search, so a lower bound."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from saltflat.amounts import check_count, check_positive
from saltflat.noise import normals
from saltflat.setting import Found, Setting
from saltflat.statistics import statistic
from saltflat.whole import Weights, check_loss, gradient_at, moved, norm_of, scales_of


@statistic(
    per="network",
    meaning="Largest rise of the loss that was found within a ball around the weights.",
    passes=lambda steps, **_: 3 * steps,
)
def worst_rise(setting: Setting, *, radius: float = 0.05, steps: int = 20, adaptive: bool = True) -> Found:
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
    scales = scales_of(setting)
    if not adaptive:
        scales = {name: torch.ones_like(each) for name, each in scales.items()}

    def at(u: Weights) -> tuple[float, dict[str, Tensor]]:
        loss, gradient = gradient_at(setting, moved(setting, {name: scales[name] * u[name] for name in u}))
        return loss, {name: scales[name] * each for name, each in gradient.items()}

    u = {name: torch.zeros_like(each) for name, each in scales.items()}
    here, uphill = at(u)
    best = check_loss(here)
    slope, first = norm_of(uphill), 0.0
    # At a minimum the slope is rounding: any direction serves to start from, provided that it is not a special one.
    if slope * radius <= 1e-12 * max(abs(here), 1e-12):
        uphill = normals(setting, 0)
    step = radius
    for number in range(steps):
        length = norm_of(uphill)
        if length == 0:
            break
        tried = _into({name: u[name] + (step / length) * uphill[name] for name in u}, radius)
        loss, there = at(tried)
        if number == 0:
            first = loss - here
        if best < loss < inf:
            u, best, uphill, step = tried, loss, there, 2 * step
        else:
            step /= 4
        setting.tick("Search for the largest rise", number + 1, steps)
    rise = max(best - here, 0.0)
    promised = radius * norm_of(uphill) - sum(float((uphill[name] * u[name]).sum()) for name in u)
    gap = max(promised, 0.0) / rise if rise > 0 else 0.0
    note = "The largest rise found by a search within the ball: a lower bound of the largest there is."
    found = {"value": rise, "first_step": first, "slope": slope, "gap": gap}
    return Found(found, exact=False, notes=(note,))


def _into(u: Weights, radius: float) -> dict[str, Tensor]:
    """The nearest point of the ball."""
    shrink = min(1.0, radius / norm_of(u))
    return {name: shrink * each for name, each in u.items()}
