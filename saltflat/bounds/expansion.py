r"""Bounds linear in the KL divergence, with the risk of random networks split by its expansion around the network.

.. math::
    L_D(Q) \le L_S(Q) + \frac{\mathrm{KL} + \ln(1/\delta)}{\lambda} + \frac{\lambda}{c\,m},
    \qquad L_S(Q) = L_S(\bar\theta) + \text{curvature} + E
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

from saltflat.bounds.distributions import WeightDistribution
from saltflat.bounds.evidence import Evidence
from saltflat.bounds.pac_bayes import MonteCarlo, bound_linear, make_grid
from saltflat.bounds.registry import BoundResult

GUESSING_SHARE = 0.95  # of the risk of guessing, from which on random networks are said to guess
GUESSING = (
    "The random networks do hardly better than guessing: with weights that vary as much, what the network learned is "
    "lost."
)
STRENGTHS = make_grid(1.0, 2.0**40, 2.0)  # Lambda, fixed before any data are seen


@dataclass(frozen=True)
class PosteriorChoice:
    r"""A posterior and its prior, for one :math:`\lambda`.

    Attributes:
        weights: the posterior.
        strength: :math:`\lambda`.
        curvature: the rise of the risk to second order.
        kl: KL divergence from the prior, for given scales.
        scales: negative logarithm of the prior's probability of these scales.
        unions: the same for the other grids.
    """

    weights: WeightDistribution
    strength: float
    curvature: float
    kl: float
    scales: float
    unions: float


def choose_strength_of_rise(
    evidence: Evidence, constant: float, rise: float, cost: float, strengths: Sequence[float] = STRENGTHS
) -> tuple[float, float]:
    r"""Return the smallest bound without its risk and remainder, and the :math:`\lambda` it belongs to.

    .. math::
        \frac{r}{\sqrt\lambda} + \frac{c_0 + \ln(1/\delta)}{\lambda} + \frac{\lambda}{c\,m}

    Args:
        evidence: the network and its data.
        constant: c.
        rise: r, curvature and KL divergence in units of :math:`1 / \sqrt\lambda`.
        cost: :math:`c_0`, what all grids cost.
        strengths: the grid of lambdas.
    """
    m, delta = evidence.examples, evidence.bound_delta
    return min(
        (bound_linear(0.0, rise * sqrt(s) + cost, m, delta, strength=s, constant=constant), s) for s in strengths
    )


def make_expansion_result(
    evidence: Evidence,
    choice: PosteriorChoice,
    constant: float,
    parts: Mapping[str, float],
    details: Mapping[str, Any],
    notes: Sequence[str] = (),
    measured: MonteCarlo | None = None,
) -> BoundResult:
    """Measure the remainder, and add up the bound.

    Args:
        evidence: the network and its data.
        choice: the posterior.
        constant: c.
        parts: terms of the paper that make up curvature and KL divergence, by name.
        details: further results.
        notes: remarks for the reader.
        measured: the risk of the posterior's networks, if it was measured already.
    """
    found = measured or evidence.estimate(choice.weights, evidence.monte_carlo_delta)
    own, strength = evidence.risk, choice.strength
    shares = {
        "risk of random networks": found.upper,
        "weights": choice.kl / strength,
        "scales": choice.scales / strength,
        "confidence": (log(1 / evidence.bound_delta) + choice.unions) / strength,
        "strength": strength / (constant * evidence.examples),
    }
    value = bound_linear(
        found.upper,
        choice.kl + choice.scales + choice.unions,
        evidence.examples,
        evidence.bound_delta,
        strength=strength,
        constant=constant,
    )
    largest = max(shares, key=shares.__getitem__)
    said = f"The largest term is {largest}: {shares[largest]:.4g}"
    if value >= evidence.chance:
        alone = "by itself" if shares[largest] >= evidence.chance else "together with the others"
        said += f"; {alone} it makes the bound vacuous"
    driver = {}
    if largest == "strength":
        # Lambda is as large as what it divides makes it.
        costs = {name: shares[name] * strength for name in ("weights", "scales", "confidence")}
        dearest = max(costs, key=costs.__getitem__)
        driver = {"driven_by": dearest}
        said += f". Of what lambda divides, {dearest} is the largest part: {costs[dearest]:.4g}"
    surrogate = (
        "The 0-1 error has no curvature, so that of the loss stands in; the remainder makes up for the difference."
    )
    return BoundResult(
        value,
        {
            "risk of the network": own,
            **parts,
            "curvature": choice.curvature,
            "remainder": found.upper - own - choice.curvature,
            **shares,
            "lambda": strength,
            "delta of the bound": evidence.bound_delta,
            "delta of Monte Carlo": evidence.monte_carlo_delta,
        },
        evidence.list_assumptions(),
        {
            **details,
            "largest_term": largest,
            **driver,
            "parts": list(shares),
            "kl": choice.kl,
            "scale_cost": choice.scales,
            "monte_carlo_mean": found.mean,
            "monte_carlo_margin": found.margin,
            "monte_carlo_samples": found.samples,
            "constant": constant,
            "strengths": len(STRENGTHS),
        },
        (
            f"{said}.",
            "The bound is the sum of the terms from the risk of random networks to strength, which is lambda / (c m). "
            "The risk of random networks is the network's own, curvature and remainder.",
            *((GUESSING,) if found.mean >= GUESSING_SHARE * evidence.chance else ()),
            *((surrogate,) if evidence.of == "error" else ()),
            *notes,
        ),
    )
