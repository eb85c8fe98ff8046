"""Balancing a sum of exponentials of linear forms: the problem that all balancing is a case of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from saltflat.balance.balanced import check_nonnegative, check_solver_options, format_convergence_notes
from saltflat.balance.drift import find_drift
from saltflat.balance.settle import balance_flow
from saltflat.balance.terms import Array, TermFlow
from saltflat.errors import OptionError


@dataclass(frozen=True)
class FormBalanceResult:
    """The smallest total that scales can reach, and the scales that reach it.

    Attributes:
        value: the infimum.
        terms: ``(terms,)``, what each term adds to it.
        potentials: ``(scales,)``, logarithms of scales that reach it, or would if there were no lost terms. Always
            finite; 0 for scales that no term needs. Where the terms leave a choice this is one of many.
        lost: ``(terms,)``, the terms above 0 that can be made as small as one likes: they add nothing.
        drift: ``(scales,)``, how to lose them. Along ``potentials + t * drift`` each falls at least as fast as
            ``exp(-t)``, and no other term changes; all 0 if nothing is lost.
        residual: the largest ``|ln(out / in)|`` of any scale, with the sums of the terms that its growth lifts and
            lowers, each times the size of its entry; 0 if there are none.
        converged: whether ``residual`` is within the tolerance. If not, ``value`` is only an upper bound.
        attained: whether some finite scales reach ``value``: whether nothing is lost.
        sweeps: how often all potentials were updated.
        notes: what a reader should know besides.
    """

    value: float
    terms: Array
    potentials: Array
    lost: NDArray[np.bool_]
    drift: Array
    residual: float
    converged: bool
    attained: bool
    sweeps: int
    notes: tuple[str, ...]


def balance_forms(
    forms: csr_array, weights: Array | Tensor, tolerance: float = 1e-10, limit: int = 10_000
) -> FormBalanceResult:
    r"""The smallest sum of terms when scales multiply each of them by a monomial.

    .. math::
        \inf_s \sum_e b_e e^{A_e \cdot s}

    An edge of a graph is a term with +1 for its tail and -1 for its head, an edge from or to the ground a term with one
    entry. Sums of scales, more than two of them and powers are as good.

    Args:
        forms: A, ``(terms, scales)``, best of small whole or half numbers; an empty row is a constant.
        weights: b, ``(terms,)``, at least 0.
        tolerance: largest ``|ln(out / in)|`` that counts as balanced.
        limit: sweeps after which to give up.

    Example:
        A query and a key share one scale: :math:`1 e^{2u} + 16 e^{-2u}` is smallest at :math:`e^{2u} = 4`.

        >>> found = balance_forms(csr_array([[2.0], [-2.0]]), torch.tensor([1.0, 16.0]))
        >>> round(found.value, 9), np.exp(2 * found.potentials).round(9).tolist()
        (8.0, [4.0])

        With a third term that only a second scale holds up, :math:`5 e^{u - v}`, the value stays.

        >>> found = balance_forms(csr_array([[2.0, 0.0], [-2.0, 0.0], [1.0, -1.0]]), torch.tensor([1.0, 16.0, 5.0]))
        >>> round(found.value, 9), found.lost.tolist(), found.drift.tolist()
        (8.0, [False, False, True], [0.0, 1.0])
    """
    check_solver_options(tolerance, limit)
    A, b = _check_terms(forms, weights)
    there = np.flatnonzero(b > 0)
    A = A[there]
    A.sum_duplicates()
    A.eliminate_zeros()
    moving = np.diff(A.indptr) > 0
    A, there = A[moving], there[moving]
    vanishing, way = find_drift(A)
    lost = np.zeros(len(b), dtype=bool)
    lost[there[vanishing]] = True
    A, there = A[~vanishing], there[~vanishing]
    live = np.flatnonzero(np.bincount(A.indices, minlength=A.shape[1]))
    terms, potentials = np.where(lost, 0.0, b), np.zeros(A.shape[1])
    residual, sweeps = 0.0, 0
    if len(live):
        # Factors of all entries are only another unit of the scales: sweeps want rows of at most 2 in all.
        unit = 2 / float(abs(A).sum(1).max())
        flow = TermFlow(csr_array(A[:, live] * unit), np.log(b[there]))
        z, residual, sweeps = balance_flow(flow, torch.zeros(1, len(live), dtype=torch.float64), tolerance, limit)
        terms[there] = np.exp(flow.compute_log_terms(z))
        potentials[live] = unit * z[0].numpy()
    notes: tuple[str, ...] = ()
    if lost.any():
        notes = (
            f"{lost.sum()} of {(b > 0).sum()} terms can be scaled towards 0 without end and add nothing; no finite "
            "scales reach the value.",
        )
    return FormBalanceResult(
        value=float(terms.sum()),
        terms=terms,
        potentials=potentials,
        lost=lost,
        drift=way,
        residual=residual,
        converged=residual <= tolerance,
        attained=not lost.any(),
        sweeps=sweeps,
        notes=(*notes, *format_convergence_notes(residual, tolerance, sweeps)),
    )


def _check_terms(forms: csr_array, weights: Array | Tensor) -> tuple[csr_array, Array]:
    A, b = (
        csr_array(forms).astype(np.float64, copy=False),
        check_nonnegative(torch.as_tensor(weights), "weights").cpu().numpy(),
    )
    if A.ndim != 2 or b.shape != A.shape[:1] or not np.isfinite(A.data).all():
        raise OptionError(
            f"Got forms of shape {A.shape} and weights of shape {b.shape}. Want (terms, scales) and (terms,), with "
            "finite entries. Do: give every term a row of its factors' exponents and one weight."
        )
    return A, b
