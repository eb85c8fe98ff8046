r"""Balance a sum of exponentials of linear forms, of which all balancing is a special case.

Term e is :math:`t_e = b_e e^{A_e \cdot z}`. Where :math:`A_{ej}` is positive, :math:`A_{ej} t_e` flows out of scale j;
where it is negative, :math:`-A_{ej} t_e` flows into it. At the minimum as much flows out of every scale as flows in.
An edge of a graph is a term with +1 at its tail and -1 at its head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import Tensor

from saltflat.balance.result import check_nonnegative, check_solver_options, find_components, format_convergence_notes
from saltflat.balance.solver import Flow, FlowPoint, balance_flow
from saltflat.errors import OptionError, SaltflatError

Array = NDArray[np.float64]


class TermFlow(Flow):
    """Needs rows of A whose sizes add up to 2 at most, and in every column entries of both signs."""

    # All scales move at once, each by its share of the sum of sizes: for shifts x the total then only falls, because
    # exp(sum_j a_j x_j) <= sum_j |a_j| / 2 exp(2 sign(a_j) x_j) + a constant, whose minimum is at a quarter each.
    pace = 0.25

    def __init__(self, A: csr_array, log_weights: Array) -> None:
        self.A, self.log_weights = A, log_weights
        by_scale = A.T.tocsr()
        self.out, self.into = FlowSide(by_scale, 1), FlowSide(by_scale, -1)

    def compute_log_terms(self, z: Tensor) -> Array:
        return np.asarray(self.log_weights + self.A @ z[0].numpy())

    def make_point(self, z: Tensor) -> TermFlowPoint:
        return TermFlowPoint(self, z)


class FlowSide:
    """The entries of one sign, scale by scale."""

    def __init__(self, by_scale: csr_array, sign: int) -> None:
        has = sign * by_scale.data > 0
        self.shape = by_scale.shape
        self.terms = by_scale.indices[has]
        self.starts = np.append(0, np.cumsum(has))[by_scale.indptr]
        self.log_sizes = np.log(abs(by_scale.data[has]))

    def compute_flows(self, log_terms: Array) -> tuple[csr_array, Array]:
        """``(scales, terms)``, in units that every scale has for itself, and the logarithms of those.

        So no flow is too small to be seen.
        """
        logs = log_terms[self.terms] + self.log_sizes
        units = np.maximum.reduceat(logs, self.starts[:-1])
        logs -= np.repeat(units, np.diff(self.starts))
        return csr_array((np.exp(logs, out=logs), self.terms, self.starts), shape=self.shape), units


class TermFlowPoint(FlowPoint):
    def __init__(self, flow: TermFlow, z: Tensor) -> None:
        self.flow, self.z = flow, z
        self.log_terms = flow.compute_log_terms(z)
        self.out, self.out_units = flow.out.compute_flows(self.log_terms)
        self.into, self.in_units = flow.into.compute_flows(self.log_terms)

    def _compute_log_flows(self, change: Array) -> tuple[Array, Array]:
        return np.log(self.out @ change) + self.out_units, np.log(self.into @ change) + self.in_units

    def compute_imbalance(self, shift: Tensor) -> Tensor:
        log_out, log_in = self._compute_log_flows(np.exp(self.flow.A @ shift[0].numpy()))
        return torch.from_numpy(log_out - log_in)[None]

    def compute_log_flow(self) -> Tensor:
        return torch.from_numpy(np.logaddexp(*self._compute_log_flows(np.ones_like(self.log_terms))))[None]

    @cached_property
    def _root(self) -> tuple[csr_array, csr_array]:
        """M with M^T M the second derivative over the roots of the flows at both ends; its transpose."""
        A, flow = self.flow.A, self.compute_log_flow()[0].numpy()
        logs = np.repeat(self.log_terms, np.diff(A.indptr)) - flow[A.indices]
        M = csr_array((A.data * np.exp(logs / 2), A.indices, A.indptr), shape=A.shape)
        return M, M.T.tocsr()

    def multiply_stiffness(self, v: Tensor) -> Tensor:
        M, turned = self._root
        return torch.from_numpy(turned @ (M @ v[0].numpy()))[None]

    def compute_stiffness(self, root: Tensor) -> Tensor:
        M, turned = self._root
        return torch.from_numpy((turned @ M).toarray())[None]


Integers = NDArray[np.int64]
# Terms that fall slower than this along a direction that has one fall by 1 are looked at again, among themselves.
SLOW = 1e-3


def find_drift(A: csr_array) -> tuple[NDArray[np.bool_], Array]:
    """The terms (rows, none of them empty) that are lost, and a direction along which each falls by 1 or more.

    Example:
        exp(x) + exp(-x) + exp(x - y) + exp(-y): y can grow without end.

        >>> lost, way = find_drift(csr_array([[1.0, 0.0], [-1.0, 0.0], [1.0, -1.0], [0.0, -1.0]]))
        >>> lost.tolist(), way.tolist()
        ([False, False, True, True], [0.0, 1.0])
    """
    paired, tails, heads = _build_signed_graph(A)
    nodes = 2 * A.shape[1] + 1
    parts = find_components(torch.from_numpy(tails), torch.from_numpy(heads), nodes).numpy()
    if paired.all():
        way = _compute_component_levels(parts, tails, heads)
        lost = A @ way < 0
    else:
        lost, way = _find_drift_by_lp(A, parts)
    return lost, way / np.min(-(A @ way)[lost], initial=np.inf)


def _build_signed_graph(A: csr_array) -> tuple[NDArray[np.bool_], Integers, Integers]:
    """Which rows have at most two entries, of one size, and the graph that these are.

    A sum x + y is no edge from x to y. But if every scale is two nodes, 2j for x and 2j + 1 for -x, it is an edge from
    x to -y, and one from y to -x; a single x is one from x to 0 and from 0 to -x, with 0 the last node.
    """
    counts = np.diff(A.indptr)
    first, last = A.indptr[:-1], A.indptr[1:] - 1
    paired = (counts <= 2) & (abs(A.data[first]) == abs(A.data[last]))
    first, last, single = first[paired], last[paired], counts[paired] == 1
    zero = 2 * A.shape[1]
    tails = 2 * A.indices[first].astype(np.int64) + (A.data[first] < 0)
    heads = np.where(single, zero, 2 * A.indices[last].astype(np.int64) + (A.data[last] > 0))
    mirrored = np.where(heads == zero, zero, heads ^ 1)
    return paired, np.append(tails, mirrored), np.append(heads, tails ^ 1)


def _compute_component_levels(parts: Integers, tails: Integers, heads: Integers) -> Array:
    """Every part of the graph as high as the longest way to it; scales are halfway between their two nodes."""
    tails, heads = parts[tails], parts[heads]
    # Parts have no cycles between them. Most edges are inside a part, and many join the same two.
    tails, heads = np.divmod(np.unique((tails * len(parts) + heads)[tails != heads]), len(parts))
    level = np.zeros(len(parts))
    while (low := level[heads] < level[tails] + 1).any():
        np.maximum.at(level, heads[low], level[tails[low]] + 1)
    return np.asarray(level[parts[:-1:2]] - level[parts[1::2]]) / 2


def _find_drift_by_lp(A: csr_array, parts: Integers) -> tuple[NDArray[np.bool_], Array]:
    """By linear programming, on what the graph leaves open."""
    # No drift moves scales of one part against each other: they become one variable, x + y = 0 included.
    up, down = parts[:-1:2], parts[1::2]
    free = np.flatnonzero(up != down)
    groups, group = np.unique(np.minimum(up, down)[free], return_inverse=True)
    signs = np.where(up < down, 1.0, -1.0)[free]
    joined = csr_array((signs, (free, group)), shape=(len(up), len(groups)))
    sizes = np.maximum.reduceat(abs(A.data), A.indptr[:-1])
    C = csr_array((A.data / np.repeat(sizes, np.diff(A.indptr)), A.indices, A.indptr), shape=A.shape) @ joined
    C.data[abs(C.data) < 1e-12] = 0  # what cancels
    C.eliminate_zeros()
    open_rows = np.flatnonzero(np.diff(C.indptr))
    C, way, lost = C[open_rows], np.zeros(len(groups)), np.zeros(len(open_rows), dtype=bool)
    while not lost.all():
        step = _solve_linear_program(C[~lost])
        falls = -(C @ step)
        if not (falls[~lost] > SLOW).any():
            break
        # A step for the rest may lift what is lost already, which therefore falls so much more.
        before = -(C @ way)[lost]
        way = step + way * (1 + np.max(-falls[lost] / before, initial=0.0))
        lost |= falls > SLOW
    all_lost = np.zeros(A.shape[0], dtype=bool)
    all_lost[open_rows[lost]] = True
    return all_lost, np.asarray(joined @ way)


def _solve_linear_program(C: csr_array) -> Array:
    """The direction of largest total fall, with none above 1: 0 if nothing can fall."""
    # No variable is whole here, so this is linear programming; it takes sparse constraints with two sides.
    found = milp(C.sum(0), constraints=LinearConstraint(C, -1, 0), bounds=Bounds(-np.inf, np.inf))
    if found.x is None:
        raise SaltflatError(
            f"Got no answer of linear programming to which of {C.shape[0]} terms can be scaled away: {found.message} "
            "Want forms of small whole or half numbers. Do: look for entries of very different sizes."
        )
    return np.asarray(found.x)


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
            f"Expected (terms, scales) and (terms,), with finite entries, but got forms of shape {A.shape} and "
            f"weights of shape {b.shape}. Try giving every term a row of its factors' exponents and one weight."
        )
    return A, b
