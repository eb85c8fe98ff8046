r"""The bounds of Tsuzuku, Sato and Sugiyama (2020), evaluated with every term.

All follow from equation (1) of the paper: with probability :math:`1 - \delta`, for every posterior Q,

.. math::
    L_D(Q) \le L_S(Q) + \frac{\mathrm{KL}(Q \| P) + \ln(1/\delta)}{\lambda} + \frac{\lambda}{c\,m},

with a union over the grids from which the prior P and :math:`\lambda` are taken. The risk of random networks is split
as the paper splits it, :math:`L_S(Q) = L_S(\bar\theta) + \text{curvature} + E`. The paper leaves the remainder E open;
here it is measured, with a part of :math:`\delta` of its own. So each bound holds whatever the curvature is: a
curvature that says little about the loss makes it larger, not wrong.

The variance of the posterior is fixed by the best balance of curvature and KL divergence, and :math:`\lambda` by the
smallest bound with E = 0.
The paper's best :math:`\lambda`, of order :math:`m^{-1/2}` in print, is of order :math:`m^{1/2}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, log, sqrt
from typing import Any

import torch
from torch import Tensor

from saltflat.balance import balance_bipartite
from saltflat.bounds.distributions import Gaussian, ScaledGaussian
from saltflat.bounds.evidence import Evidence
from saltflat.bounds.expansion import (
    STRENGTHS,
    PosteriorChoice,
    choose_strength_of_rise,
    make_expansion_result,
)
from saltflat.bounds.pac_bayes import make_grid
from saltflat.bounds.registry import BoundResult, bound
from saltflat.bounds.scales import (
    ScaleGrid,
    compute_code_lengths,
    compute_pair_code,
    compute_radius,
    compute_step,
    count_weight_scales,
    find_best_scales,
    list_blocks,
)
from saltflat.measures.normalized import regularized_normalized_sharpness

# All fixed before any data are seen.
SPREADS = make_grid(2.0**-6, 2.0**6, 4.0)  # Lambda': how strongly factors vary, relative to normal parts
CENTERS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # B: means of the logarithms of the prior's factors
DEVIATIONS = make_grid(2.0**-8, 2.0**6, 2.0)  # of isotropic posteriors
EPSILON = 0.1  # by which rounding scales to a grid may raise curvature and KL divergence, relatively
WIDEST = 16.0  # logarithmic scales that are searched where the set of scales has no border

REFERENCE = "tsuzuku2020normalized"
SCALE_NOTE = (
    "It depends on the scale of the weights: rescaling them without changing the function changes the trace, the norm "
    "and the bound."
)


def _make_gaussian(evidence: Evidence, logs: Mapping[str, Tensor], strength: float) -> Gaussian:
    r"""Return the normal posterior with variances :math:`e^{2\sigma} / \sqrt\lambda` around the weights."""
    measured = evidence.context.problem.network.measured
    root = strength**-0.25
    return Gaussian(measured, {name: (root * each.exp()).to(measured[name].dtype) for name, each in logs.items()})


def _sum_products(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    return sum(float((value * two[name]).sum()) for name, value in one.items())


def _square(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.square() for name, value in values.items()}


@bound(
    reference=REFERENCE,
    formula="Prop. 4.1: risk + l'/(2 sqrt(l)) Fisher-Rao term + 1/(2 sqrt(l)) NS0(l') + (ln(1/delta) + n ln|B| + "
    "2 ln|L| + ln|L'|)/l + l/(c m) + E",
)
def multiplicative(evidence: Evidence, *, constant: float = 2.0) -> BoundResult:
    r"""Compute Proposition 4.1, equation (15): weights are normal numbers times log-normal factors.

    Weights are :math:`\theta = \eta \mu e^\sigma`. In the prior :math:`\mu \sim N(0, I)` and :math:`\sigma \sim
    N(\beta, \eta'^2 I)` with :math:`\beta_i \in B`; in the posterior :math:`\mu \sim N(\bar\mu, I)` and :math:`\sigma
    \sim N(\bar\sigma, \eta'^2 I)` with :math:`\eta \bar\mu e^{\bar\sigma} = \bar\theta`. With :math:`\eta^2 =
    \lambda^{-1/2}` and :math:`\eta'^2 = \lambda' \lambda^{-1/2}`,

    .. math::
        L_S(\bar\theta) + \frac{\lambda'}{2 \sqrt\lambda} \sum_i H_{ii} \bar\theta_i^2
        + \frac{1}{2 \sqrt\lambda} \mathrm{NS}_0(\lambda') + \frac{\Xi}{\lambda} + \frac{\lambda}{c\,m} + E.

    Args:
        evidence: the network and its data.
        constant: c, 2 in the paper; by Hoeffding's lemma, 8 is enough.
    """
    H, weights, n = evidence.curvature, evidence.weights, evidence.size
    squares = _square(weights)
    fisher_rao = _sum_products(H, squares)
    scales, unions = n * log(len(CENTERS)), 2 * log(len(STRENGTHS)) + log(len(SPREADS))
    best: tuple[float, float, float] = inf, 0.0, 0.0
    for spread in SPREADS:
        sharpness = sum(
            float(regularized_normalized_sharpness(weights[name], H[name], grid=CENTERS, strength=spread).value)
            for name in weights
        )
        rise = (sharpness + spread * fisher_rao) / 2
        value, s = choose_strength_of_rise(evidence, constant, rise, scales + unions)
        best = min(best, (value, spread, s))
    _, spread, strength = best
    # The slope of the minimum by the curvature is e^2s at the minimum.
    logs = {
        name: regularized_normalized_sharpness(weights[name], H[name], grid=CENTERS, strength=spread)
        .slopes["curvature_diagonal"]
        .log()
        / 2
        for name in weights
    }
    centers = torch.tensor(CENTERS, dtype=torch.float64)
    shift = sum(
        float((each[..., None] - centers.to(each.device)).square().amin(-1).sum()) / spread for each in logs.values()
    )
    wide = {name: (2 * each).exp() for name, each in logs.items()}
    narrow = {name: (-2 * each).exp() for name, each in logs.items()}
    root = sqrt(strength)
    norm, bent = _sum_products(squares, narrow), _sum_products(H, wide)
    normal = _make_gaussian(evidence, logs, strength)
    parts = {"Fisher-Rao term": spread * fisher_rao / (2 * root), "NS0 term": (bent + norm + shift) / (2 * root)}
    choice = PosteriorChoice(
        ScaledGaussian(normal.mean, normal.deviation, sqrt(spread / root)),
        strength,
        (bent + spread * fisher_rao) / (2 * root),
        root * (norm + shift) / 2,
        scales,
        unions,
    )
    details = {
        "prior": "eta mu e^sigma, mu ~ N(0, 1), sigma ~ N(b, lambda' / sqrt(lambda)), eta^2 = 1 / sqrt(lambda)",
        "posterior": "the same with means mu and sigma of which the product is the network's weight",
        "spread": spread,
        "fisher_rao": fisher_rao,
        "ns0": bent + norm + shift,
        "centers": len(CENTERS),
        "spreads": len(SPREADS),
    }
    return make_expansion_result(evidence, choice, constant, parts, details)


@bound(
    reference=REFERENCE,
    formula="Prop. 4.2: risk + (sum of curvature * e^2s + squared weight * e^-2s)/(2 sqrt(l)) + (ln(1/delta) + n ln|G| "
    "+ ln|L|)/l + l/(c m) + E, with s rounded to the grid G",
)
def parameterwise(evidence: Evidence, *, constant: float = 2.0) -> BoundResult:
    r"""Compute Proposition 4.2, equation (20): every parameter has a scale of its own, from a grid.

    The posterior is :math:`N(\bar\theta, \lambda^{-1/2} \mathrm{diag}\, e^{2 \sigma})`, and the prior has the same
    covariance and mean 0. The best scale is :math:`\sigma_i = \frac14 \ln(\bar\theta_i^2 / H_{ii})`, where curvature
    and KL divergence are :math:`\mathrm{NS}_1 / \sqrt\lambda` together. Rounded to the nearest number of the grid
    :math:`G = \{-R, \dots, R\}` with steps :math:`\Delta`, it is at most :math:`\cosh\Delta = 1 + \epsilon` times that;
    the bound is evaluated at the rounded scales themselves.

    Args:
        evidence: the network and its data.
        constant: c, 2 in the paper; by Hoeffding's lemma, 8 is enough.
    """
    H, squares, n = evidence.curvature, _square(evidence.weights), evidence.size
    radius = compute_radius(n)
    grid = ScaleGrid.build(compute_step(EPSILON, pairs=False), radius)
    logs, inside_sum, inside_least = {}, 0.0, 0.0
    for name, curvature in H.items():
        best = find_best_scales(curvature, squares[name], inf)
        logs[name] = grid.find_numbers(best.clamp(-grid.radius, grid.radius)) * grid.step
        inside = best.abs() <= grid.radius
        each = curvature * (2 * logs[name]).exp() + squares[name] * (-2 * logs[name]).exp()
        inside_sum += float(each[inside].sum())
        inside_least += 2 * float((curvature * squares[name]).sqrt()[inside].sum())
    bent = _sum_products(H, {name: (2 * each).exp() for name, each in logs.items()})
    norm = _sum_products(squares, {name: (-2 * each).exp() for name, each in logs.items()})
    least = sum(float((each * squares[name]).sqrt().sum()) for name, each in H.items())
    scales, unions = n * log(grid.size), log(len(STRENGTHS))
    _, strength = choose_strength_of_rise(evidence, constant, (bent + norm) / 2, scales + unions)
    root = sqrt(strength)
    parts = {"NS1 term": least / root, "rounding": (bent + norm) / (2 * root) - least / root}
    choice = PosteriorChoice(
        _make_gaussian(evidence, logs, strength),
        strength,
        bent / (2 * root),
        root * norm / 2,
        scales,
        unions,
    )
    details = {
        "prior": "N(0, e^2s / sqrt(lambda))",
        "posterior": "N(weights, e^2s / sqrt(lambda))",
        "ns1": least,
        "radius": grid.radius,
        "step": grid.step,
        "grid": grid.size,
        "rounding_factor": inside_sum / inside_least if inside_least else 1.0,
        "rounding_limit": 1 + EPSILON,
    }
    return make_expansion_result(evidence, choice, constant, parts, details)


@bound(
    reference=REFERENCE,
    formula="Prop. 6.1: risk + NS2(R)/(2 sqrt(l)) + (ln(1/delta) + (rows + columns) ln|G| + ln|L|)/l + l/(c m) + E, "
    "with the scales of rows and columns rounded to the grid G",
)
def row_column(evidence: Evidence, *, constant: float = 2.0) -> BoundResult:
    r"""Compute Proposition 6.1: rows and columns have scales, from a grid in [-R, R].

    The posterior is :math:`N(\bar\theta, \lambda^{-1/2} e^{2 (\gamma_i + \gamma'_j)})`, the prior has the same
    covariance and mean 0, and the scales minimize

    .. math::
        \mathrm{NS}_2(R) = \sum_l \min_{|\gamma_i|, |\gamma'_j| \le R} \sum_{ij}
        F_{ij} e^{2 (\gamma_i + \gamma'_j)} + U_{ij} e^{-2 (\gamma_i + \gamma'_j)}.

    A bias is one more column of its layer's weight, and other vectors have a scale for each entry, so that the bound is
    on the whole network. Rounding to a grid with steps :math:`\Delta` multiplies an optimum inside the box by at most
    :math:`\cosh 2\Delta = (1 + \epsilon)^2`.

    Args:
        evidence: the network and its data.
        constant: c, 2 in the paper; by Hoeffding's lemma, 8 is enough.
    """
    return _bound_rows_and_columns(evidence, constant, evidence.curvature, None)


@bound(
    reference=REFERENCE,
    formula="Thm. 6.1: risk + NS_col/sqrt(l) + rounding + (ln(1/delta) + cost of scales + ln|L|)/l + l/(c m) + E, with "
    "curvature estimated from differences of gradients",
)
def row_column_estimated(evidence: Evidence, *, constant: float = 2.0, curvature_draws: int = 10) -> BoundResult:
    r"""Compute Theorem 6.1: rows and columns have scales without a border, and the curvature is estimated.

    The curvature is the Hessian's diagonal by differences of gradients, equations (29) to (31), with negative entries
    set to 0. Curvature and KL divergence are :math:`\mathrm{NS}_\mathrm{col} / \sqrt\lambda` together at the best
    scales, half of it each: where the risk of random networks is measured instead of expanded, half of the paper's
    coefficient is left over. Scales are integer multiples of a step; the prior probability of :math:`k` is
    proportional to :math:`(1 + |k|)^{-2}`. The largest scales searched are :math:`e^{\pm 16}`.

    Args:
        evidence: the network and its data.
        constant: c, 2 in the paper; by Hoeffding's lemma, 8 is enough.
        curvature_draws: random signs for the estimate of the curvature, at least 2.
    """
    F, negative = evidence.estimate_curvature(curvature_draws)
    return _bound_rows_and_columns(evidence, constant, F, negative)


def _bound_rows_and_columns(
    evidence: Evidence, constant: float, curvature: Mapping[str, Tensor], negative: int | None
) -> BoundResult:
    """Compute Proposition 6.1, or Theorem 6.1 if the curvature is estimated, with so many entries set to 0."""
    squares = _square(evidence.weights)
    blocks = list_blocks(evidence.weights, evidence.geometries)
    step = compute_step(EPSILON, pairs=True)
    grid = ScaleGrid.build(step, compute_radius(evidence.size) if negative is None else WIDEST)
    logs: dict[str, Tensor] = {}
    least = bent = norm = lengths = residual = infimum = 0.0
    converged = True
    for block in blocks:
        F, U = block.join(curvature), block.join(squares)
        rows, columns, off, good = block.minimize(F, U, grid.radius)
        residual, converged = max(residual, off), converged and good
        best = 2 * (rows[:, :, None] + columns[:, None, :])
        least += float((F * best.exp() + U * (-best).exp()).sum())
        if negative is not None:
            found = balance_bipartite(F, U).value if block.has_columns else 2 * float((F * U).sqrt().sum())
            infimum += found / 2
        numbers = [grid.find_numbers(each) for each in ([rows, columns] if block.has_columns else [rows])]
        lengths += compute_pair_code(*numbers) if block.has_columns else float(compute_code_lengths(*numbers).sum())
        rounded = [each * grid.step for each in numbers]
        both = rounded[0][:, :, None] + (rounded[1][:, None, :] if block.has_columns else 0.0)
        both = both.expand(F.shape)
        bent += float((F * (2 * both).exp()).sum())
        norm += float((U * (-2 * both).exp()).sum())
        logs |= block.spread(both)
    count = sum(block.count for block in blocks)
    scales = count * log(grid.size) if negative is None else lengths
    unions = log(len(STRENGTHS))
    _, strength = choose_strength_of_rise(evidence, constant, (bent + norm) / 2, scales + unions)
    root = sqrt(strength)
    sharpness = least / 2 if negative is None else infimum
    name = "NS2 term" if negative is None else "NS_col term"
    parts = {name: sharpness / root, "rounding": (bent + norm) / (2 * root) - sharpness / root}
    choice = PosteriorChoice(
        _make_gaussian(evidence, logs, strength),
        strength,
        bent / (2 * root),
        root * norm / 2,
        scales,
        unions,
    )
    details: dict[str, Any] = {
        "prior": "N(0, e^(2 (g + g')) / sqrt(lambda))",
        "posterior": "N(weights, e^(2 (g + g')) / sqrt(lambda))",
        "scales": count,
        "scales_of_weights": count_weight_scales(blocks),
        "step": grid.step,
        "rounding_factor": (bent + norm) / least if least else 1.0,
        "rounding_limit": (1 + EPSILON) ** 2,
        "residual": residual,
        "converged": converged,
    }
    notes = [
        f"There are {count:,} scales for {evidence.size:,} parameters; the rows and columns of the weight matrices "
        f"alone, which the paper counts, are {details['scales_of_weights']:,}."
    ]
    if negative is None:
        details |= {"ns2": least, "radius": grid.radius, "grid": grid.size}
    else:
        # Of the paper's coefficient, what is needed for the KL divergence alone.
        details |= {"ns_col": infimum, "negative_curvatures": negative}
        details["needed_coefficient"] = norm / (2 * infimum) if infimum else 0.0
        notes.append(
            "Curvature was estimated from differences of gradients; "
            f"{negative:,} of {evidence.size:,} estimates were negative and taken as 0."
        )
    if not converged:
        notes.append(
            f"Balancing stopped at a residual of {residual:.1e}: the scales are not quite the best. The bound holds."
        )
    return make_expansion_result(evidence, choice, constant, parts, details, notes)


@bound(
    reference=REFERENCE,
    formula="eqs. 5 and 6: risk + (s^2/2) trace of curvature + (|weights|^2/(2 s^2) + ln(1/delta) + ln|S| + ln|L|)/l + "
    "l/(c m) + E, smallest over s",
)
def isotropic(evidence: Evidence, *, constant: float = 2.0) -> BoundResult:
    r"""Compute the bound of equations (1), (5) and (6): all weights have one variance.

    The posterior is :math:`N(\bar\theta, s^2 I)` and the prior :math:`N(0, s^2 I)`. To second order the risk rises by
    :math:`\frac{s^2}{2} \mathrm{tr}\, H`; the rise is measured for every s of a grid, each with an equal part of the
    probability to fail.

    Args:
        evidence: the network and its data.
        constant: c, 2 in the paper; by Hoeffding's lemma, 8 is enough.
    """
    trace = sum(float(value.sum()) for value in evidence.curvature.values())
    norm = sum(float(value.sum()) for value in _square(evidence.weights).values())
    parameters = evidence.context.problem.network.measured
    unions = log(len(STRENGTHS)) + log(len(DEVIATIONS))
    rows, results = [], []
    for s in DEVIATIONS:
        kl, curvature = norm / (2 * s**2), s**2 / 2 * trace
        _, strength = choose_strength_of_rise(evidence, constant, 0.0, kl + unions)
        weights = Gaussian(parameters, {name: torch.full_like(value, s) for name, value in parameters.items()})
        found = evidence.estimate(weights, evidence.monte_carlo_delta / len(DEVIATIONS))
        choice = PosteriorChoice(weights, strength, curvature, kl, 0.0, unions)
        details = {
            "prior": "N(0, s^2)",
            "posterior": "N(weights, s^2)",
            "deviation": s,
            "trace": trace,
            "squared_norm": norm,
        }
        rise = found.mean - evidence.risk
        compared = f"With deviation {s:g} the risk rose by {rise:.4g}; to second order it rises by {curvature:.4g}."
        result = make_expansion_result(evidence, choice, constant, {}, details, [compared, SCALE_NOTE], found)
        rows.append({"deviation": s, "rise": rise, "expected": curvature, "bound": result.value})
        results.append(result)
    best = min(results, key=lambda result: result.value)
    return replace(best, details={**best.details, "by_deviation": rows})
