r"""Normal posteriors around a network's weights: in closed form from its curvature, or by descent on the bound.

The prior is normal around :math:`\theta_0`, with one standard deviation :math:`s_l` for each parameter tensor, or one
for all of them, taken from a grid that is fixed in advance. To second order, a posterior with variances
:math:`\sigma_i^2` raises the mean loss by :math:`\frac12 \sum_i H_{ii} \sigma_i^2`. Weighed against the KL divergence
by :math:`\lambda`, the minimum is

.. math::
    \sigma_i^2 = \frac{1}{1 / s_l^2 + \lambda H_{ii}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite, log, sqrt
from typing import Any

import torch
from torch import Tensor

from saltflat.bounds.distributions import Gaussian, Noise, compute_gaussian_kl
from saltflat.bounds.pac_bayes import MonteCarlo, bound_maurer, make_grid
from saltflat.bounds.stochastic import (
    BoundedLoss,
    RandomNetwork,
    compute_bounded_losses,
    estimate_risk,
)
from saltflat.engine.data import Batch
from saltflat.engine.example_groups import can_join, join_batches
from saltflat.engine.problem import cast_targets
from saltflat.errors import NonFiniteError

# Deviations that a prior may have, in units of the canonical form, in which the weights into a unit have norm 1.
SCALES = make_grid(2.0**-14, 2.0**4, 2.0**0.25)
# How strongly curvature counts against the KL divergence, in multiples of the number of examples.
STRENGTHS = make_grid(2.0**-8, 2.0**6, 2.0)
TRIAL = 5000  # examples on which a posterior is tried
BATCH = 250  # examples of a step of the descent


@dataclass(frozen=True)
class Posterior:
    """A posterior and the prior it is measured against.

    Attributes:
        weights: the posterior.
        center: mean of the prior, in float64.
        scales: standard deviation of the prior, for each parameter tensor.
    """

    weights: Gaussian
    center: Mapping[str, Tensor]
    scales: Mapping[str, float]

    def compute_kl(self) -> float:
        """Return the KL divergence from the prior, in float64."""
        return sum(self.compute_kl_by_parameter().values())

    def compute_kl_by_parameter(self) -> dict[str, float]:
        """Return the part of each parameter tensor in the KL divergence."""
        return {
            name: compute_gaussian_kl(
                {name: mean},
                {name: self.weights.deviation[name].double().square()},
                {name: self.center[name]},
                {name: torch.full_like(self.center[name], self.scales[name] ** 2)},
            )
            for name, mean in self.weights.mean.items()
        }

    def compute_selection_cost(self) -> float:
        """Return what the choice of the scales adds to the KL divergence: ln of the number of choices."""
        return compute_selection_cost(self.scales)


# Terms of a certificate that add up to it.
PARTS = (
    "risk of random networks",
    "Monte Carlo margin",
    "added by confidence and choice",
    "added by the KL divergence",
)


@dataclass(frozen=True)
class Certificate:
    """The numbers of a certificate.

    Attributes:
        posterior: around the network.
        risk: of random networks on the examples.
        own: risk of the network itself.
        center: risk of the network at the center of the posterior, which a descent may have moved.
        examples: their number.
        delta: the probability with which the inequality itself may fail.
    """

    posterior: Posterior
    risk: MonteCarlo
    own: float
    center: float
    examples: int
    delta: float

    @property
    def value(self) -> float:
        """The bound."""
        kl = self.posterior.compute_kl() + self.posterior.compute_selection_cost()
        return bound_maurer(self.risk.upper, kl, self.examples, self.delta)

    def list_terms(self) -> dict[str, float]:
        """Return all terms, in the order of the computation: the risk, then nats, then what they add to it."""
        selection = self.posterior.compute_selection_cost()
        without_kl = bound_maurer(self.risk.upper, selection, self.examples, self.delta)
        return {
            "risk of the network itself": self.own,
            "risk at the center": self.center,
            "risk of random networks": self.risk.mean,
            "Monte Carlo margin": self.risk.margin,
            "KL divergence (nats)": self.posterior.compute_kl(),
            "choice of the prior's scales (nats)": selection,
            "confidence (nats)": log(2 * sqrt(self.examples) / self.delta),
            "added by confidence and choice": without_kl - self.risk.upper,
            "added by the KL divergence": self.value - without_kl,
        }


def compute_distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return the distance of two sets of weights, relative to the norm of the second."""
    apart = sum(float((one[name] - two[name]).double().square().sum()) for name in two)
    size = sum(float(each.double().square().sum()) for each in two.values())
    return sqrt(apart / size) if size else 0.0


def compute_selection_cost(scales: Mapping[str, float]) -> float:
    """Return ln of the number of priors to choose from.

    There is one scale for all tensors, or one for each; and the prior is normal in the canonical form, or in the form
    given where the network has no canonical one.

    Example:
        >>> round(compute_selection_cost({"a": 1.0, "b": 1.0}), 6) == round(log(4 * len(SCALES)), 6)
        True
    """
    choices = 1 if len(set(scales.values())) == 1 else len(scales)
    return log(4) + choices * log(len(SCALES))


def solve_posterior(
    mean: Mapping[str, Tensor], center: Mapping[str, Tensor], curvature: Mapping[str, Tensor], strength: float
) -> Posterior:
    r"""Return the posterior that minimizes :math:`\lambda \sum_i H_{ii} \sigma_i^2 / 2 + \mathrm{KL}` at fixed means.

    The scales of the prior are the best ones of :data:`SCALES`: one for each tensor, or one for all of them.

    Args:
        mean: of the posterior, by parameter.
        center: mean of the prior.
        curvature: the diagonal H of the curvature of the mean loss.
        strength: :math:`\lambda`.
    """
    scaled = {name: strength * curvature[name].double().clamp_min(0.0) for name in mean}
    costs = {name: _compute_costs(value, center[name], scaled[name]) for name, value in mean.items()}
    shared = SCALES[int(torch.stack(list(costs.values())).sum(0).argmin())]
    own = {name: SCALES[int(each.argmin())] for name, each in costs.items()}

    def compute_total(scales: Mapping[str, float]) -> float:
        found = sum(float(costs[name][SCALES.index(scale)]) for name, scale in scales.items())
        return found + compute_selection_cost(scales)

    scales = min(own, dict.fromkeys(mean, shared), key=compute_total)
    deviations = {name: (1 / scales[name] ** 2 + scaled[name]).rsqrt().to(value) for name, value in mean.items()}
    return Posterior(Gaussian(dict(mean), deviations), {name: each.double() for name, each in center.items()}, scales)


def _compute_costs(mean: Tensor, center: Tensor, scaled: Tensor) -> Tensor:
    """Return curvature and KL divergence of a tensor with each of the scales, at the best variances."""
    distance = float((mean.double() - center.double()).square().sum())
    return torch.tensor(
        [0.5 * (float(torch.log1p(scaled * s**2).sum()) + distance / s**2) for s in SCALES], dtype=torch.float64
    )


def choose_posterior(
    network: RandomNetwork,
    center: Mapping[str, Tensor],
    curvature: Mapping[str, Tensor],
    kind: BoundedLoss,
    examples: int,
    delta: float,
    seed: int,
    share: float = 1.0,
) -> tuple[float, float, Posterior]:
    """Return the closed-form posterior with the smallest bound over :data:`STRENGTHS`, tried on a part of the data.

    The search moves from one strength to the next as long as the bound falls. The mean of the posterior is the share
    of the way from the prior's center to the network.

    Returns:
        About what the bound would be, the strength in multiples of the number of examples, and the posterior.
    """
    measured = network.context.problem.network.measured
    mean = {name: torch.lerp(center[name].to(value), value, share) for name, value in measured.items()}
    tried: dict[float, tuple[float, Posterior]] = {}

    def try_strength(relative: float) -> float:
        if relative not in tried:
            found = solve_posterior(mean, center, curvature, relative * examples)
            tried[relative] = estimate_bound(network, found, kind, examples, delta, seed), found
        return tried[relative][0]

    middle = len(STRENGTHS) // 2
    try_strength(STRENGTHS[middle])
    for direction in (STRENGTHS[middle:], STRENGTHS[middle::-1]):
        for one, two in pairwise(direction):
            # Where the risk does not depend on the weights at all, bounds can tie.
            if try_strength(two) > try_strength(one):
                break
    best = min(tried, key=lambda relative: tried[relative][0])
    return tried[best][0], best, tried[best][1]


def estimate_bound(
    network: RandomNetwork, posterior: Posterior, kind: BoundedLoss, examples: int, delta: float, seed: int
) -> float:
    """Return about what the bound would be, from one draw on a part of the data."""
    risk = estimate_risk(
        network, posterior.weights, kind, draws=1, seed=seed, delta=delta, examples=TRIAL, what="Trying posteriors"
    ).mean
    kl = posterior.compute_kl() + posterior.compute_selection_cost()
    return bound_maurer(risk, kl, examples, delta) if kl < inf else 1.0


def descend_bound(
    network: RandomNetwork,
    start: Posterior,
    kind: BoundedLoss,
    examples: int,
    delta: float,
    seed: int,
    *,
    epochs: int,
    move: bool,
    lr: float = 1e-3,
) -> Posterior:
    r"""Lower the bound by stochastic gradient descent on the posterior's deviations and, if wanted, its means.

    Each step lowers the cross-entropy of random networks plus the KL divergence, weighed against each other as the
    bound weighs error and KL divergence at the moment. The scales of the prior move along, and are rounded to
    :data:`SCALES` in the end. The posterior to begin with is returned if it turns out better.

    Args:
        network: runs the model.
        start: the posterior to begin with.
        kind: the loss in [0, 1] that is bounded.
        examples: number of examples of the bound.
        delta: the probability with which the bound may fail.
        seed: of the random numbers.
        epochs: number of passes over the data.
        move: whether to move the means as well.
        lr: Adam's learning rate of the means, cosine schedule; that of log deviations is ten times as large.
    """
    if not epochs:
        return start
    context = network.context
    loss, data = context.problem.loss, list(context.problem.read_batches())
    data = [join_batches(data)] if all(can_join(data[0], each) for each in data[1:]) else data
    means = {name: each.detach().clone().requires_grad_(move) for name, each in start.weights.mean.items()}
    # Deviations relative to the prior's, so that where the loss does not depend on a weight both change together.
    ratios = {
        name: (each.detach() / start.scales[name]).log().requires_grad_()
        for name, each in start.weights.deviation.items()
    }
    scales = {
        name: torch.tensor(log(scale), dtype=torch.float64).to(means[name]).requires_grad_()
        for name, scale in start.scales.items()
    }
    if len(set(start.scales.values())) == 1:  # one choice, which costs less than one for each
        scales = dict.fromkeys(scales, next(iter(scales.values())))
    center = {name: start.center[name].to(each) for name, each in means.items()}
    groups: list[dict[str, Any]] = [{"params": [*ratios.values(), *dict.fromkeys(scales.values())], "lr": 10 * lr}]
    if move:
        groups.append({"params": list(means.values()), "lr": lr})
    optimizer = torch.optim.Adam(groups)
    generator = torch.Generator().manual_seed(seed)
    free = [each for group in groups for each in group["params"]]
    steps = sum(-(-each.examples // BATCH) for each in data) * epochs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    risk, entropy, step = 0.0, 0.0, 0
    for _ in range(epochs):
        for batch in _iterate_shuffled(data, generator):
            optimizer.zero_grad()
            # The gradient of the cross-entropy, in parts that fit in memory.
            errors = total = 0.0
            for part in network.iterate_parts(batch):
                weights = Gaussian(means, {name: (scales[name] + each).exp() for name, each in ratios.items()})
                outputs = network.run(part, weights, Noise(seed, step))
                errors += float(compute_bounded_losses(kind, loss, outputs.detach(), part.targets).sum())
                value = loss.total(outputs.double(), cast_targets(part.targets)).sum() / batch.examples
                value.backward()
                total += float(value.detach())
            keep = min(0.98, step / (step + 10))
            risk = keep * risk + (1 - keep) * errors / batch.examples
            entropy = keep * entropy + (1 - keep) * total
            kl = torch.stack(
                [_compute_kl(means[name], ratios[name], center[name], scales[name]) for name in means]
            ).sum()
            _check_converges(total + float(kl.detach()), lr)
            bound = bound_maurer(risk, max(0.0, float(kl.detach())), examples, delta)
            # The slopes of the bound in the risk and in the KL divergence, from the derivatives of the binary kl.
            low = min(max(risk, 1 / examples), 0.999)
            high = min(max(bound, low * (1 + 1e-6)), 1 - 1e-9)
            trade = log(high * (1 - low) / (low * (1 - high)))
            for each in free:
                if each.grad is not None:
                    each.grad *= max(low, 1e-4) / max(entropy, 1e-12)
            (kl / (examples * trade)).backward()
            optimizer.step()
            schedule.step()
            step += 1
            context.tick("Lowering the bound", step, steps)
    nearest = {name: _find_nearest_scale(float(each.detach())) for name, each in scales.items()}
    deviations = {name: nearest[name] * each.detach().exp() for name, each in ratios.items()}
    means = {name: each.detach() for name, each in means.items()}
    found = replace(start, weights=Gaussian(means, deviations), scales=nearest)
    # A descent from a good posterior can end at a worse one.
    return min((found, start), key=lambda each: estimate_bound(network, each, kind, examples, delta, seed + 1))


def _check_converges(value: float, lr: float) -> None:
    if not isfinite(value):
        raise NonFiniteError(
            "Expected a finite loss and finite weights of random networks, but got NaN or infinity during the descent "
            f"on the bound. Try a smaller learning rate than lr={lr:g}, or epochs=0."
        )


def _iterate_shuffled(data: list[Batch], generator: torch.Generator) -> list[Batch]:
    """Return small batches of all examples in random order."""
    parts = []
    for whole in data:
        order = torch.randperm(whole.examples, generator=generator)
        parts += [whole.take(order[at : at + BATCH], 0) for at in range(0, whole.examples, BATCH)]
    return parts


def _find_nearest_scale(log_scale: float) -> float:
    return min(SCALES, key=lambda scale: abs(log(scale) - log_scale))


def _compute_kl(mean: Tensor, log_ratio: Tensor, center: Tensor, log_scale: Tensor) -> Tensor:
    spread = (2 * log_ratio).exp() - 1 - 2 * log_ratio
    distance = (mean - center).square().sum(dtype=torch.float64) * (-2 * log_scale).exp()
    return 0.5 * (spread.sum(dtype=torch.float64) + distance)
