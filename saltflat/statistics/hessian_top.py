"""The largest eigenvalue of the true Hessian of the whole network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

from saltflat.amounts import check_positive
from saltflat.errors import unknown
from saltflat.noise import normals
from saltflat.setting import Found, Setting
from saltflat.statistics import statistic
from saltflat.whole import check_symmetric, hessian_product

Vector = NDArray[np.float64]

DENSE = 24  # rows up to which taking every column is no more work than searching
RESTARTS = 100
# Largest residual, relative to the eigenvalue, that is called converged: what products in this precision allow.
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6}


@dataclass(frozen=True)
class Top:
    """The largest eigenvalue, which need not be the largest in size.

    Attributes:
        value: the eigenvalue.
        vector: v, of length 1.
        residual: the length of Av - value v.
        asymmetry: how much u'Av and v'Au differ for another vector u, relative to the lengths of Au and Av.
        products: how often A was applied.
    """

    value: float
    vector: Vector
    residual: float
    asymmetry: float
    products: int


@statistic(per="network", meaning="Largest eigenvalue of the Hessian of the mean loss over all parameters.")
def hessian_top(setting: Setting, *, scaled: str = "none", tolerance: float = 1e-8) -> Found:
    r"""The largest eigenvalue of H, or of :math:`D^{1/2} H D^{1/2}` with :math:`D = |W_l|^2` for every parameter.

    Args:
        setting: what is measured.
        scaled: ``"none"`` or ``"quotient"``.
        tolerance: of the eigenvalue, relative.

    Returns:
        ``value``; ``residual``, the distance of Hv from its multiple of v relative to it; ``products`` with the
        Hessian; and ``converged``.
    """
    check_positive(tolerance=tolerance)
    measured = setting.problem.network.measured
    if scaled not in ("none", "quotient"):
        raise unknown("scaling", scaled, ("none", "quotient"))
    roots = {name: each.double().norm() if scaled == "quotient" else 1.0 for name, each in measured.items()}
    done = 0

    def product(vector: Vector) -> Vector:
        nonlocal done
        parts = torch.from_numpy(np.ravel(vector)).split([each.numel() for each in measured.values()])
        shaped = {
            name: roots[name] * part.reshape(each.shape).to(each.device)
            for (name, each), part in zip(measured.items(), parts, strict=True)
        }
        found = hessian_product(setting, shaped)
        done += 1
        setting.tick("hessian_top", done, None)
        return np.concatenate([(roots[name] * each).flatten().cpu().numpy() for name, each in found.items()])

    size = sum(each.numel() for each in measured.values())
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.concatenate([each.flatten().cpu().numpy() for each in normals(setting, 0).values()])
    top = top_eigenvalue(operator, start, tolerance)
    check_symmetric(setting, top.asymmetry)
    relative = top.residual / abs(top.value) if top.value else top.residual
    coarsest = max(ROUNDING[each.dtype] for each in measured.values())
    converged = relative <= coarsest
    notes = () if converged else (f"The eigenvalue search stopped at a relative residual of {relative:.1e}.",)
    found = {"value": top.value, "residual": relative, "products": top.products, "converged": converged}
    return Found(found, notes=notes)


def top_eigenvalue(operator: Any, start: Vector, tolerance: float = 1e-8) -> Top:
    """The largest eigenvalue of a symmetric operator, by Lanczos iterations.

    Args:
        operator: anything with a ``shape`` that can be multiplied with a vector by ``@``.
        start: vector to start from.
        tolerance: of the eigenvalue, relative.

    >>> top = top_eigenvalue(np.diag([-5.0, 3.0, 1.0]), np.ones(3))
    >>> round(top.value, 9), top.vector.round(9).tolist()
    (3.0, [0.0, 1.0, 0.0])
    """
    products, size = 0, operator.shape[0]

    def product(vector: Vector) -> Vector:
        nonlocal products
        products += 1
        return np.asarray(operator @ np.ravel(vector), dtype=np.float64)

    if size <= DENSE:
        matrix = np.stack([product(column) for column in np.eye(size)], 1)
        values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        vector = vectors[:, -1]
        residual = float(np.linalg.norm(matrix @ vector - values[-1] * vector))
        return Top(float(values[-1]), vector, residual, _relative(matrix - matrix.T, matrix), products)
    first = start / np.linalg.norm(start)
    moved = product(first)
    vector = first
    if np.any(moved):
        vector = _searched(LinearOperator((size, size), matvec=product, dtype=np.float64), first, tolerance)
    image = product(vector)
    value = float(vector @ image)
    asymmetry = _relative(np.asarray(first @ image - vector @ moved), np.concatenate([image, moved]))
    return Top(value, vector, float(np.linalg.norm(image - value * vector)), asymmetry, products)


def _relative(difference: Vector, size: Vector) -> float:
    return float(np.linalg.norm(difference) / np.linalg.norm(size)) if np.any(size) else 0.0


def _searched(operator: LinearOperator, start: Vector, tolerance: float) -> Vector:
    """The best vector that was found, normalised; a coarser search where the fine one does not end."""
    for accuracy in (tolerance, 1e-2):
        try:
            _, vectors = eigsh(operator, k=1, which="LA", v0=start, tol=accuracy, maxiter=RESTARTS)
        except ArpackError:
            continue
        vector: Vector = vectors[:, 0] / np.linalg.norm(vectors[:, 0])
        return vector
    return start
