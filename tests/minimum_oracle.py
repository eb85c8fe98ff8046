"""The smallest Hessian trace by its definition: directions found by numbers alone, dense curvature, scipy.

No graph and no rule for any operation: the directions are those of :mod:`rank_oracle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from cases import Case
from measure_oracle import Array, Expansion, infimum
from oracle import curvature_diagonal
from rank_oracle import Freedom, freedom
from scipy.linalg import null_space, qr
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

FRACTION = 60  # exponents are whole multiples of one sixtieth
NEAR = 1e-7  # and rounding does not hide which


@dataclass(frozen=True)
class Least:
    """What rescaling can make of the trace.

    Attributes:
        value: the infimum.
        layers: each parameter's share of it; empty where it is not attained.
        attained: whether some finite factors reach it.
        reached: the trace at which a search ends that knows nothing of infima, only goes downhill.
    """

    value: float
    layers: dict[str, float]
    attained: bool
    reached: float


def least_trace(case: Case, kind: str) -> Least:
    """Over all rescalings that leave frozen parameters alone; for "layer", those with one factor for each parameter."""
    found, basis = directions(case)
    blocks = {name: found.blocks[name] for name, _ in case.model.named_parameters()}
    stays = [basis[block] for name, block in blocks.items() if not case.model.get_parameter(name).requires_grad]
    if kind == "layer":
        effective = [basis[block][~found.ineffective[block].numpy()] for block in blocks.values()]
        stays += [rows - rows[:1] for rows in effective]
    basis = within(basis, stays)
    diagonal = {name: value.flatten().numpy() for name, value in curvature_diagonal(case).items()}
    weights = np.concatenate(list(diagonal.values()))
    if not basis.shape[1]:
        return Least(weights.sum(), {name: each.sum() for name, each in diagonal.items()}, True, weights.sum())
    # Entries with the same exponents are one term.
    terms, which = np.unique(
        np.concatenate([-2 * basis[blocks[name]] for name in diagonal]), axis=0, return_inverse=True
    )
    sums: Array = np.bincount(which, weights, len(terms)).astype(np.float64)
    value, at = infimum(sums.tolist(), list(terms))
    layers = {}
    if at is not None:
        layers = {n: float(each @ np.exp(-2 * basis[blocks[n]] @ at)) for n, each in diagonal.items()}
    return Least(value, layers, at is not None, downhill(sums, terms))


def downhill(weights: Array, exponents: Array) -> float:
    """sum_k b_k exp(<a_k, z>) where a trust region search that starts at 0 stops; its logarithm is convex."""
    b, A = weights[weights > 0], exponents[weights > 0]

    def expansion(z: Array) -> Expansion:
        logs = np.log(b) + A @ z
        p = softmax(logs)
        slope = p @ A
        return float(logsumexp(logs)), slope, (A.T * p) @ A - np.outer(slope, slope)

    def value_of(z: Array) -> float:
        return expansion(z)[0]

    def slope_of(z: Array) -> Array:
        return expansion(z)[1]

    def bend_of(z: Array) -> Array:
        return expansion(z)[2]

    found = minimize(value_of, np.zeros(A.shape[1]), jac=slope_of, hess=bend_of, method="trust-ncg", tol=1e-10)
    return float(np.exp(found.fun))


@cache
def directions(case: Case) -> tuple[Freedom, Array]:
    """All rescalings, ``(columns, dimension)``, as whole numbers and simple fractions."""
    found = freedom(case)
    return found, simple(found.basis.numpy())


def within(basis: Array, stays: Sequence[Array]) -> Array:
    """The directions of a basis along which none of these rows moves."""
    if not basis.shape[1] or not stays:
        return basis
    rows = np.concatenate(stays)
    return simple(basis @ null_space(rows)) if rows.any() else basis


def simple(basis: Array) -> Array:
    """Another basis of the same directions: ones and zeros in some rows, and in all others what follows from that.

    That is exact, so that a linear program can tell what grows from what stays.
    """
    if not basis.shape[1]:
        return basis
    _, _, order = qr(basis.T, mode="economic", pivoting=True)
    raw = basis @ np.linalg.inv(basis[order[: basis.shape[1]]])
    rounded: Array = np.round(FRACTION * raw) / FRACTION
    assert np.abs(raw - rounded).max() < NEAR, "exponents are no simple fractions"
    return rounded
