r"""Balance a sum of exponentials of linear forms, the general case of matrix balancing.

Term e is :math:`t_e = b_e e^{A_e \cdot z}`. Where :math:`A_{ej}` is positive, :math:`A_{ej} t_e` flows out of scale j;
where it is negative, :math:`-A_{ej} t_e` flows into it. At the minimum the outflow of every scale equals its inflow.
An edge of a graph is a term with +1 at its tail and -1 at its head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from saltflat.balance.solver import (
    Flow,
    FlowPoint,
    balance_flow,
    check_nonnegative,
    check_solver_options,
    find_components,
    format_convergence_notes,
)
from saltflat.errors import OptionError, SaltflatError

Array = NDArray[np.float64]


class TermFlow(Flow):
    """The flow of a sum of exponentials.

    The absolute values in each row of A must add up to at most 2, and each column must have entries of both signs.
    """

    # All scales are updated at once. For shifts x the total never increases, because
    # exp(sum_j a_j x_j) <= sum_j |a_j| / 2 exp(2 sign(a_j) x_j) + a constant, whose minimum is at a quarter each.
    step_size = 0.25

    def __init__(self, A: csr_array, log_weights: Array) -> None:
        self.A, self.log_weights = A, log_weights
        by_scale = A.T.tocsr()
        self.out, self.into = FlowSide(by_scale, 1), FlowSide(by_scale, -1)

    def compute_log_terms(self, z: Tensor) -> Array:
        """Return the logarithms of all terms at potentials ``z``."""
        return np.asarray(self.log_weights + self.A @ z[0].numpy())

    def make_point(self, z: Tensor) -> TermFlowPoint:
        """Return the flow at potentials ``z``."""
        return TermFlowPoint(self, z)


class FlowSide:
    """The entries of A that have one sign, grouped by scale."""

    def __init__(self, by_scale: csr_array, sign: int) -> None:
        has = sign * by_scale.data > 0
        self.shape = by_scale.shape
        self.terms = by_scale.indices[has]
        self.starts = np.append(0, np.cumsum(has))[by_scale.indptr]
        self.log_sizes = np.log(abs(by_scale.data[has]))

    def compute_flows(self, log_terms: Array) -> tuple[csr_array, Array]:
        """Return the flows ``(scales, terms)`` in a separate unit for every scale, and the logarithms of the units.

        Separate units keep small flows from underflowing.
        """
        logs = log_terms[self.terms] + self.log_sizes
        units = np.maximum.reduceat(logs, self.starts[:-1])
        logs -= np.repeat(units, np.diff(self.starts))
        return csr_array((np.exp(logs, out=logs), self.terms, self.starts), shape=self.shape), units


class TermFlowPoint(FlowPoint):
    """The flow of a sum of exponentials at given potentials."""

    def __init__(self, flow: TermFlow, z: Tensor) -> None:
        self.flow, self.z = flow, z
        self.log_terms = flow.compute_log_terms(z)
        self.out, self.out_units = flow.out.compute_flows(self.log_terms)
        self.into, self.in_units = flow.into.compute_flows(self.log_terms)

    def _compute_log_flows(self, change: Array) -> tuple[Array, Array]:
        return np.log(self.out @ change) + self.out_units, np.log(self.into @ change) + self.in_units

    def compute_imbalance(self, shift: Tensor) -> Tensor:
        """Return ln(out / in) of every scale at ``z + shift``."""
        log_out, log_in = self._compute_log_flows(np.exp(self.flow.A @ shift[0].numpy()))
        return torch.from_numpy(log_out - log_in)[None]

    def compute_log_flow(self) -> Tensor:
        """Return ln(out + in) of every scale."""
        return torch.from_numpy(np.logaddexp(*self._compute_log_flows(np.ones_like(self.log_terms))))[None]

    @cached_property
    def _root(self) -> tuple[csr_array, csr_array]:
        """Return M and its transpose, where M^T M is the second derivative over the roots of the flows at both ends."""
        A, flow = self.flow.A, self.compute_log_flow()[0].numpy()
        logs = np.repeat(self.log_terms, np.diff(A.indptr)) - flow[A.indices]
        M = csr_array((A.data * np.exp(logs / 2), A.indices, A.indptr), shape=A.shape)
        return M, M.T.tocsr()

    def multiply_stiffness(self, v: Tensor) -> Tensor:
        """Return S v without forming S."""
        M, turned = self._root
        return torch.from_numpy(turned @ (M @ v[0].numpy()))[None]

    def compute_stiffness(self, root: Tensor) -> Tensor:
        """Return S."""
        M, turned = self._root
        return torch.from_numpy((turned @ M).toarray())[None]


Integers = NDArray[np.int64]
# Terms that decrease by less than this, where the fastest decreases by 1, are examined again among themselves.
MIN_DECREASE = 1e-3


def find_recession_direction(A: csr_array) -> tuple[NDArray[np.bool_], Array]:
    """Return which terms (nonempty rows) vanish in the limit, and a direction along which each decreases by at least 1.

    No other term changes along this direction of recession.

    Example:
        In exp(x) + exp(-x) + exp(x - y) + exp(-y), y can grow without bound.

        >>> A = csr_array([[1.0, 0.0], [-1.0, 0.0], [1.0, -1.0], [0.0, -1.0]])
        >>> vanishing, direction = find_recession_direction(A)
        >>> vanishing.tolist(), direction.tolist()
        ([False, False, True, True], [0.0, 1.0])
    """
    paired, tails, heads = _build_signed_graph(A)
    nodes = 2 * A.shape[1] + 1
    parts = find_components(torch.from_numpy(tails), torch.from_numpy(heads), nodes).numpy()
    if paired.all():
        direction = _compute_component_levels(parts, tails, heads)
        vanishing = A @ direction < 0
    else:
        vanishing, direction = _find_recession_direction_by_lp(A, parts)
    return vanishing, direction / np.min(-(A @ direction)[vanishing], initial=np.inf)


def _build_signed_graph(A: csr_array) -> tuple[NDArray[np.bool_], Integers, Integers]:
    """Return which rows have at most two entries, of equal absolute value, and the edges of the graph they form.

    A sum x + y is not an edge from x to y. With two nodes per scale, 2j for x and 2j + 1 for -x, it is an edge from x
    to -y and one from y to -x; a single x is an edge from x to 0 and one from 0 to -x, where 0 is the last node.
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
    """Return half the difference of the levels of each scale's two nodes.

    The level of a component is the length of the longest path to it.
    """
    tails, heads, nodes = parts[tails], parts[heads], len(parts)
    outside = tails != heads  # most edges lie inside a component, and many of the others join the same two
    tails, heads = tails[outside], heads[outside]
    edges = coo_array((np.ones(len(tails), dtype=bool), (tails, heads)), shape=(nodes, nodes)).tocsr()
    # There are no cycles between components: level by level, those are removed that no edge leads to any more.
    level, waiting = np.zeros(nodes), np.bincount(edges.indices, minlength=nodes)
    ready, step = np.flatnonzero(waiting == 0), 0
    while len(ready):
        level[ready] = step
        met = np.bincount(edges[ready].indices, minlength=nodes)
        waiting -= met
        ready, step = np.flatnonzero((met > 0) & (waiting == 0)), step + 1
    return np.asarray(level[parts[:-1:2]] - level[parts[1::2]]) / 2


def _find_recession_direction_by_lp(A: csr_array, parts: Integers) -> tuple[NDArray[np.bool_], Array]:
    """Find the direction by linear programming over the scales that the graph does not determine."""
    # Scales of one component move together along any such direction and become one variable, including x + y = 0.
    up, down = parts[:-1:2], parts[1::2]
    free = np.flatnonzero(up != down)
    groups, group = np.unique(np.minimum(up, down)[free], return_inverse=True)
    signs = np.where(up < down, 1.0, -1.0)[free]
    joined = csr_array((signs, (free, group)), shape=(len(up), len(groups)))
    sizes = np.maximum.reduceat(abs(A.data), A.indptr[:-1])
    C = csr_array((A.data / np.repeat(sizes, np.diff(A.indptr)), A.indices, A.indptr), shape=A.shape) @ joined
    C.data[abs(C.data) < 1e-12] = 0  # rounding errors
    C.eliminate_zeros()
    open_rows = np.flatnonzero(np.diff(C.indptr))
    C, direction, vanishing = C[open_rows], np.zeros(len(groups)), np.zeros(len(open_rows), dtype=bool)
    while not vanishing.all():
        step = _solve_linear_program(C[~vanishing])
        decrease = -(C @ step)
        if not (decrease[~vanishing] > MIN_DECREASE).any():
            break
        # A step for the remaining terms may increase vanishing ones: the previous direction is extended to compensate.
        before = -(C @ direction)[vanishing]
        direction = step + direction * (1 + np.max(-decrease[vanishing] / before, initial=0.0))
        vanishing |= decrease > MIN_DECREASE
    all_vanishing = np.zeros(A.shape[0], dtype=bool)
    all_vanishing[open_rows[vanishing]] = True
    return all_vanishing, np.asarray(joined @ direction)


def _solve_linear_program(C: csr_array) -> Array:
    """Return the direction of largest total decrease, at most 1 per term; 0 if no term can decrease."""
    # Without integer variables ``milp`` solves a linear program; it accepts sparse two-sided constraints.
    found = milp(C.sum(0), constraints=LinearConstraint(C, -1, 0), bounds=Bounds(-np.inf, np.inf))
    if found.x is None:
        raise SaltflatError(
            "Expected linear forms with small integer or half-integer entries, but got no solution of the linear "
            f"program that finds the vanishing ones of {C.shape[0]} terms: {found.message} Try removing entries of "
            "very different sizes."
        )
    return np.asarray(found.x)


@dataclass(frozen=True)
class FormBalanceResult:
    """The smallest total that scales can reach, and the scales that attain it.

    Attributes:
        value: the infimum.
        terms: ``(terms,)``, the contribution of each term.
        potentials: ``(scales,)``, logarithms of scales that minimize the terms that do not vanish. Always finite; 0 for
            scales that no such term depends on. If the minimizer is not unique, this is one of many.
        vanishing: ``(terms,)``, the positive terms that rescaling makes arbitrarily small: they contribute 0.
        recession_direction: ``(scales,)``. Along ``potentials + t * recession_direction`` every vanishing term falls at
            least as fast as ``exp(-t)``, and no other term changes; all 0 if no term vanishes.
        residual: the largest ``|ln(out / in)|`` of any scale, where out and in are the sums of the terms that increase
            and decrease with it, each times the absolute value of its entry; 0 if there are none.
        converged: whether ``residual`` is within the tolerance. If not, ``value`` is only an upper bound.
        attained: whether finite scales attain ``value``, that is, no term vanishes.
        sweeps: number of updates of all potentials.
        notes: further remarks for the reader.
    """

    value: float
    terms: Array
    potentials: Array
    vanishing: NDArray[np.bool_]
    recession_direction: Array
    residual: float
    converged: bool
    attained: bool
    sweeps: int
    notes: tuple[str, ...]


def balance_forms(
    forms: csr_array, weights: Array | Tensor, tolerance: float = 1e-10, limit: int = 10_000
) -> FormBalanceResult:
    r"""Minimize a sum of terms, each multiplied by a monomial of positive scales.

    .. math::
        \inf_s \sum_e b_e e^{A_e \cdot s}

    An edge of a graph is a term with +1 for its tail and -1 for its head; an edge from or to a fixed node is a term
    with one entry. Rows may have any number of entries of any sign and size.

    Args:
        forms: A, ``(terms, scales)``, preferably with small integer or half-integer entries; an empty row is a
            constant.
        weights: b, ``(terms,)``, nonnegative.
        tolerance: largest ``|ln(out / in)|`` that counts as balanced.
        limit: maximum number of sweeps.

    Example:
        A query and a key share one scale: :math:`1 e^{2u} + 16 e^{-2u}` is smallest at :math:`e^{2u} = 4`.

        >>> found = balance_forms(csr_array([[2.0], [-2.0]]), torch.tensor([1.0, 16.0]))
        >>> round(found.value, 9), np.exp(2 * found.potentials).round(9).tolist()
        (8.0, [4.0])

        A third term :math:`5 e^{u - v}` vanishes as v grows and leaves the value unchanged.

        >>> found = balance_forms(csr_array([[2.0, 0.0], [-2.0, 0.0], [1.0, -1.0]]), torch.tensor([1.0, 16.0, 5.0]))
        >>> round(found.value, 9), found.vanishing.tolist(), found.recession_direction.tolist()
        (8.0, [False, False, True], [0.0, 1.0])
    """
    check_solver_options(tolerance, limit)
    A, b = _check_terms(forms, weights)
    if not A.has_canonical_format or not A.data.all():
        A = A.copy()
        A.sum_duplicates()
        A.eliminate_zeros()
    there = np.flatnonzero((b > 0) & (np.diff(A.indptr) > 0))
    A = _select_rows(A, there)
    vanishing_rows, direction = find_recession_direction(A)
    vanishing = np.zeros(len(b), dtype=bool)
    vanishing[there[vanishing_rows]] = True
    there = there[~vanishing_rows]
    A = _select_rows(A, np.flatnonzero(~vanishing_rows))
    live = np.flatnonzero(np.bincount(A.indices, minlength=A.shape[1]))
    terms, potentials = np.where(vanishing, 0.0, b), np.zeros(A.shape[1])
    residual, sweeps = 0.0, 0
    if len(live):
        # A common factor of all entries only changes the unit of the scales: sweeps need row sums of at most 2.
        unit = 2 / float(abs(A).sum(1).max())
        flow = TermFlow(csr_array(A[:, live] * unit), np.log(b[there]))
        z, residual, sweeps = balance_flow(flow, torch.zeros(1, len(live), dtype=torch.float64), tolerance, limit)
        terms[there] = np.exp(flow.compute_log_terms(z))
        potentials[live] = unit * z[0].numpy()
    notes: tuple[str, ...] = ()
    if vanishing.any():
        notes = (
            f"{vanishing.sum()} of {(b > 0).sum()} terms vanish: rescaling makes them arbitrarily small. No finite "
            "scales attain the value.",
        )
    return FormBalanceResult(
        value=float(terms.sum()),
        terms=terms,
        potentials=potentials,
        vanishing=vanishing,
        recession_direction=direction,
        residual=residual,
        converged=residual <= tolerance,
        attained=not vanishing.any(),
        sweeps=sweeps,
        notes=(*notes, *format_convergence_notes(residual, tolerance, sweeps)),
    )


def _select_rows(A: csr_array, rows: Integers) -> csr_array:
    selected: csr_array = A if len(rows) == A.shape[0] else A[rows]
    return selected


def _check_terms(forms: csr_array, weights: Array | Tensor) -> tuple[csr_array, Array]:
    A, b = (
        csr_array(forms).astype(np.float64, copy=False),
        check_nonnegative(torch.as_tensor(weights), "weights").cpu().numpy(),
    )
    if A.ndim != 2 or b.shape != A.shape[:1] or not np.isfinite(A.data).all():
        raise OptionError(
            f"Expected finite forms (terms, scales) and weights (terms,), but got forms of shape {A.shape} and "
            f"weights of shape {b.shape}. Try passing one row of exponents and one weight per term."
        )
    return A, b
