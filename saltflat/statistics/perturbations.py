"""How the loss and the accuracy respond to finite changes of the weights."""

from __future__ import annotations

from math import fsum, inf, isfinite, nan, sqrt

import torch
from torch import Tensor

from saltflat.engine.context import Context, StatisticResult
from saltflat.engine.full_loss import (
    Weights,
    check_finite_loss,
    compute_accuracy_at,
    compute_gradient_at,
    compute_grouped_losses,
    compute_moved_weights,
    compute_norm,
    compute_scales,
)
from saltflat.engine.noise import compute_mean_and_error, draw_normals
from saltflat.engine.statistic import statistic
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.validation import check_count, check_positive


@statistic(
    per="network",
    meaning="Mean rise of the loss under random relative changes of all parameters.",
    passes=lambda draws, **_: draws + 1,
)
def average_rise(context: Context, *, radius: float = 0.05, draws: int = 20) -> StatisticResult:
    r"""Return E L(w + d) - L(w) with :math:`d_i = \rho w_i \xi_i` and standard normal :math:`\xi`.

    Draws come in pairs :math:`\pm\xi`, so that the slope of the loss cancels; their scatter gives the error.

    Args:
        context: what is measured.
        radius: :math:`\rho`, the relative size of the changes.
        draws: how many; an even number.

    Returns:
        ``value``, ``stderr`` and the rises of all ``pairs``.
    """
    check_positive(radius=radius)
    check_count(4, draws=draws)
    if draws % 2:
        raise OptionError(
            f"Expected an even number, but got draws={draws}. They come in pairs. Try taking {draws + 1}."
        )
    start = compute_grouped_losses(context)
    here = check_finite_loss(start.compute_mean())
    pairs, by_group = [], []
    for draw in range(draws // 2):
        # Relative to the weights from the start, so that rescaled networks are disturbed in the same way.
        noise = draw_normals(context, draw)
        step = {name: radius * each * noise[name] for name, each in context.problem.network.measured.items()}
        there = compute_grouped_losses(context, compute_moved_weights(context, step))
        back = compute_grouped_losses(
            context, compute_moved_weights(context, {name: -each for name, each in step.items()})
        )
        pairs.append((there.compute_mean() + back.compute_mean()) / 2 - here)
        by_group.append((there.make_leave_one_out(), back.make_leave_one_out()))
        context.tick("Loss under random changes", 2 * (draw + 1), draws)
    if not all(map(isfinite, pairs)):
        note = "The loss overflows at some of the changed weights."
        return StatisticResult({"value": nan, "stderr": nan, "pairs": pairs}, exact=False, notes=(note,))
    value, stderr = compute_mean_and_error(pairs)

    def compute_without(group: int) -> dict[str, float]:
        before = start.make_leave_one_out()
        assert before is not None
        rises = [(there(group) + back(group)) / 2 - before(group) for there, back in by_group if there and back]
        return {"value": fsum(rises) / len(rises)}

    known = start.make_leave_one_out() is not None
    result = {"value": value, "stderr": stderr, "pairs": pairs}
    return StatisticResult(result, exact=False, without=compute_without if known else None)


@statistic(
    per="network",
    meaning="Largest rise of the loss that was found within a ball around the weights.",
    passes=lambda steps, **_: 3 * steps,
)
def worst_rise(context: Context, *, radius: float = 0.05, steps: int = 20, adaptive: bool = True) -> StatisticResult:
    r"""Find the largest L(w + d) - L(w) with :math:`|d / c|_2 \le \rho`; c is \|w\|, or 1 if not ``adaptive``.

    Projected ascent in the coordinates u = d / c. The first step leads to SAM's (or ASAM's) point; a step that raises
    the loss is followed by a longer one, which makes it a power iteration where the surface is convex, and one that
    does not is taken back and tried shorter.

    Args:
        context: what is measured.
        radius: :math:`\rho`.
        steps: how many gradients to take.
        adaptive: whether the ball is measured relative to the weights.

    Returns:
        ``value``; ``first_step``, the rise at SAM's point; ``slope``, the length of the gradient in u; and ``gap``,
        what the slope at the point found still promises within the ball, relative to the value: 0 at a maximum.
    """
    check_positive(radius=radius)
    check_count(1, steps=steps)
    scales = compute_scales(context)
    if not adaptive:
        scales = {name: torch.ones_like(each) for name, each in scales.items()}

    def compute_loss_and_gradient(u: Weights) -> tuple[float, dict[str, Tensor]]:
        loss, gradient = compute_gradient_at(
            context, compute_moved_weights(context, {name: scales[name] * u[name] for name in u})
        )
        return loss, {name: scales[name] * each for name, each in gradient.items()}

    u = {name: torch.zeros_like(each) for name, each in scales.items()}
    here, uphill = compute_loss_and_gradient(u)
    best = check_finite_loss(here)
    slope, first = compute_norm(uphill), 0.0
    # At a minimum the slope is rounding: any direction serves to start from, provided that it is not a special one.
    if slope * radius <= 1e-12 * max(abs(here), 1e-12):
        uphill = draw_normals(context, 0)
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
        context.tick("Search for the largest rise", number + 1, steps)
    rise = max(best - here, 0.0)
    promised = radius * compute_norm(uphill) - sum(float((uphill[name] * u[name]).sum()) for name in u)
    gap = max(promised, 0.0) / rise if rise > 0 else 0.0
    note = "The largest rise found by a search within the ball: a lower bound of the largest there is."
    found = {"value": rise, "first_step": first, "slope": slope, "gap": gap}
    return StatisticResult(found, exact=False, notes=(note,))


def _project_into_ball(u: Weights, radius: float) -> dict[str, Tensor]:
    """Project a point onto the ball."""
    shrink = min(1.0, radius / compute_norm(u))
    return {name: shrink * each for name, each in u.items()}


@statistic(
    per="network",
    meaning="Rise of the loss under changes relative to the weights, on average or at worst.",
    passes=lambda case, draws, steps, **_: 3 * steps if case == "worst" else draws + 1,
)
def adaptive_rise(
    context: Context, *, case: str = "average", radius: float = 0.05, draws: int = 20, steps: int = 20
) -> StatisticResult:
    """Return :func:`average_rise` or :func:`worst_rise`, as ``case`` says."""
    if case == "average":
        return average_rise(context, radius=radius, draws=draws)
    if case == "worst":
        return worst_rise(context, radius=radius, steps=steps)
    raise make_unknown_name_error("case", case, ("average", "worst"))


DOUBLINGS = 10
HALVINGS = 30


@statistic(
    per="network",
    meaning="Largest noise on all parameters under which the accuracy drops by at most a tenth.",
    passes=lambda draws, depth, **_: draws * (depth + 5),
)
def noise_tolerance(
    context: Context,
    *,
    drop: float = 0.1,
    draws: int = 10,
    magnitude_aware: bool = False,
    epsilon: float = 1e-3,
    depth: int = 20,
) -> StatisticResult:
    r"""Find the largest :math:`\sigma` whose noise lowers the mean accuracy by at most ``drop``.

    The noise is :math:`N(0, \sigma^2)`, or :math:`N(0, \sigma^2 w_i^2 + \epsilon^2)` if ``magnitude_aware``. The same
    draws serve every :math:`\sigma`, which makes the search a bisection between two that were tried.

    Args:
        context: what is measured.
        drop: of the accuracy, a fraction.
        draws: of the noise.
        magnitude_aware: whether the noise is relative to the weights.
        epsilon: smallest noise, where it is relative.
        depth: how often to bisect.

    Returns:
        ``sigma``, nan where there is none; ``bracket``, the last one borne and the first one not; ``accuracy``, that of
        the network; and ``accuracies``, the mean ones at the two ends of the bracket.
    """
    check_positive(drop=drop, epsilon=epsilon)
    if not isinstance(magnitude_aware, bool):
        raise OptionError(
            f"Expected True or False, but got magnitude_aware={magnitude_aware!r}. Try leaving it out for False."
        )
    check_count(1, draws=draws, depth=depth)
    measured = context.problem.network.measured
    here, done = compute_accuracy_at(context), 0

    def compute_noisy_accuracy(sigma: float) -> float:
        nonlocal done
        found = 0.0
        for draw in range(draws):
            noise = draw_normals(context, draw)
            step = {
                name: _compute_noise_size(each, sigma, magnitude_aware, epsilon) * noise[name]
                for name, each in measured.items()
            }
            found += compute_accuracy_at(context, compute_moved_weights(context, step)) / draws
        done += 1
        context.tick("Noise that the accuracy bears", done, None)
        return found

    def is_tolerated(accuracy: float) -> bool:
        return accuracy >= here - drop - 1e-12

    def make_result(low: float, high: float, reason: str = "") -> StatisticResult:
        ends = [seen.get(low, nan), seen.get(high, nan)]
        value = {"sigma": nan if reason else low, "bracket": [low, high], "accuracy": here, "accuracies": ends}
        return StatisticResult(value, exact=False, notes=(reason,) if reason else ())

    seen: dict[float, float] = {}
    if here - drop <= 0:
        return make_result(0.0, nan, f"The accuracy is {here:.3g} and cannot drop by {drop:g}.")
    numbers = sum(each.numel() for each in measured.values())
    # Weights that are all zero have no size to begin with.
    sigma = 0.1 if magnitude_aware else 0.1 * compute_norm(measured) / sqrt(numbers) or 0.1
    low, high = 0.0, 0.0
    while not (low and high):
        seen[sigma] = compute_noisy_accuracy(sigma)
        if is_tolerated(seen[sigma]):
            low, sigma = sigma, 2 * sigma
        else:
            high, sigma = sigma, sigma / 2
        if len(seen) > DOUBLINGS and not high:
            return make_result(low, nan, f"The accuracy never drops by {drop:g}, up to noise of {low:.3g}.")
        if len(seen) > HALVINGS and not low:
            return make_result(
                0.0, high, f"The accuracy drops by more than {drop:g} under noise as small as {high:.3g}."
            )
    for _ in range(depth):
        middle = (low + high) / 2
        seen[middle] = compute_noisy_accuracy(middle)
        low, high = (middle, high) if is_tolerated(seen[middle]) else (low, middle)
    return make_result(low, high)


def _compute_noise_size(weight: Tensor, sigma: float, magnitude_aware: bool, epsilon: float) -> Tensor | float:
    return (sigma**2 * weight.double().square() + epsilon**2).sqrt() if magnitude_aware else sigma
