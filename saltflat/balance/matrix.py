r"""Balance two nonnegative matrices against each other: rows and columns as nodes, or rows alone.

For row potentials :math:`x`, column j receives :math:`a_j = \sum_i F_{ij} e^{x_i}` and returns
:math:`b_j = \sum_i U_{ij} e^{-x_i}`. Both problems minimize :math:`\sum_j (a_j b_j)^p / p`: with p = 1/2 each
column has its own optimal scale, with p = 1 columns have none. Column j carries the flow
:math:`w_j = (a_j b_j)^p`, of which row i sends the share :math:`P_{ij} = F_{ij} e^{x_i} / a_j` and receives
:math:`Q_{ij} = U_{ij} e^{-x_i} / b_j`. So out = P w, in = Q w, and the second derivative is diag(out + in) - W with

.. math::
    W = (1 - p) (P w P^T + Q w Q^T) + p (P w Q^T + Q w P^T).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from saltflat.balance.solver import (
    BalanceResult,
    Flow,
    FlowPoint,
    balance_flow,
    build_laplacian,
    check_nonnegative,
    check_solver_options,
    find_cyclic_entries,
    format_convergence_notes,
)
from saltflat.errors import OptionError

# The logarithm of 0, kept finite so that differences are never nan; its exponential is 0.
LOG_ZERO = -1e5
# Matrices with more entries are not kept for a second time.
MAX_SHARED_ENTRIES = 2**18
# Flows whose logarithms differ by more than this are stored in separate units.
MAX_LOG_RANGE = 500.0


def balance_bipartite(F: Tensor, U: Tensor, tolerance: float = 1e-10, limit: int = 10_000) -> BalanceResult:
    r"""Minimize the sum of two matrices, one multiplied and the other divided by scales of rows and columns.

    .. math::
        \min_{s, t > 0} \sum_{ij} F_{ij} s_i t_j + \frac{U_{ij}}{s_i t_j}
        = 2 \min_s \sum_j \Big(\sum_i F_{ij} s_i\Big)^{1/2} \Big(\sum_i U_{ij} / s_i\Big)^{1/2}

    Args:
        F: ``(rows, columns)`` or ``(groups, rows, columns)``, nonnegative; every group is a separate problem.
        U: of the same shape.
        tolerance: largest ``|ln(out / in)|`` that counts as balanced.
        limit: maximum number of sweeps.

    Example:
        A single column needs no column scale: :math:`2 \sum_i \sqrt{F_i U_i}`, here 2 (sqrt(1 * 4) + sqrt(9 * 4)).

        >>> found = balance_bipartite(torch.tensor([[1.0], [9.0]]), torch.tensor([[4.0], [4.0]]))
        >>> round(found.value, 9), found.attained
        (16.0, True)
    """
    shared = _SHARED.get()
    for one, other, options, found in shared or ():
        if options == (tolerance, limit) and _is_same_matrix(one, F) and _is_same_matrix(other, U):
            return found
    # Rows and columns play the same role; Newton's method works on the rows, so these should be few.
    transposed = F.shape == U.shape and F.dim() in (2, 3) and F.shape[-2] > F.shape[-1]
    found = _balance_matrices(F, U, 0.5, tolerance, limit, transposed)
    if shared is not None and F.numel() <= MAX_SHARED_ENTRIES:
        shared.append((F, U, (tolerance, limit), found))
    return found


def _is_same_matrix(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


_Balanced: TypeAlias = tuple[Tensor, Tensor, tuple[float, int], BalanceResult]
_SHARED: ContextVar[list[_Balanced] | None] = ContextVar("balanced", default=None)


@contextmanager
def share_balances() -> Iterator[None]:
    """Balance small matrices only once until the end of the block, if :func:`balance_bipartite` gets them again."""
    token = _SHARED.set([])
    try:
        yield
    finally:
        _SHARED.reset(token)


def balance_factored(F: Tensor, U: Tensor, tolerance: float = 1e-10, limit: int = 10_000) -> BalanceResult:
    r"""Minimize the sum of the entries of a product whose rows are multiplied and columns divided by scales.

    .. math::
        \min_g \sum_{ik} (F U^T)_{ik} e^{g_i - g_k}

    The product is not formed. A matrix of its size is formed only for up to about two thousand rows, and only if sweeps
    do not converge. Its diagonal contributes a constant to the value.

    Args:
        F: ``(rows, columns)`` or ``(groups, rows, columns)``, nonnegative; every group is a separate problem.
        U: of the same shape.
        tolerance: largest ``|ln(out / in)|`` that counts as balanced.
        limit: maximum number of sweeps.

    Example:
        One column: :math:`(\sum_i \sqrt{F_i U_i})^2`, here (sqrt(1 * 4) + sqrt(9 * 4))^2.

        >>> found = balance_factored(torch.tensor([[1.0], [9.0]]), torch.tensor([[4.0], [4.0]]))
        >>> round(found.value, 9), found.column_potentials is None
        (64.0, True)
    """
    return _balance_matrices(F, U, 1.0, tolerance, limit)


def _balance_matrices(
    F: Tensor, U: Tensor, power: float, tolerance: float, limit: int, transposed: bool = False
) -> BalanceResult:
    check_solver_options(tolerance, limit)
    if F.shape != U.shape or F.dim() not in (2, 3):
        raise OptionError(
            "Expected two matrices of the same shape, (rows, columns) or (groups, rows, columns), but got shapes "
            f"{tuple(F.shape)} and {tuple(U.shape)}. Try summing a convolution over its kernel positions first."
        )
    single = F.dim() == 2
    F, U = (check_nonnegative(matrix, name) for matrix, name in ((F, "F"), (U, "U")))
    if transposed:
        F, U = F.mT.contiguous(), U.mT.contiguous()
    if single:
        F, U = F[None], U[None]
    kept = find_cyclic_entries(F, U)
    had = (F + U) > 0
    if kept is not None:
        F, U = torch.where(kept, F, 0.0), torch.where(kept, U, 0.0)
    has = F > 0
    x, y, values = F.new_zeros(F.shape[:2]), F.new_zeros(F.shape[::2]), F.new_zeros(len(F))
    residual, sweeps, slopes = 0.0, 0, torch.zeros_like(F)
    if bool(has.any()):
        flow = ColumnFlow(F.log(), U.log(), power)
        x, residual, sweeps = balance_flow(flow, flow.compute_start(), tolerance, limit)
        point = flow.make_point(x)
        y = (point.log_b - point.log_a) / 2
        values = point.log_w.exp().sum(1) / power
        # d/dF_ij of (a_j b_j)^p / p at fixed potentials; at a minimum their derivatives do not contribute.
        through = power * (point.log_a + point.log_b) - point.log_a
        slopes = torch.where(has, (x[:, :, None] + through[:, None, :]).exp(), 0.0)
    rows = _mask_potentials(x, had.any(2), has.any(2))
    columns = _mask_potentials(y, had.any(1), has.any(1))
    if transposed:
        rows, columns, slopes = columns, rows, slopes.mT
    return BalanceResult(
        value=float(values.sum()),
        values=values,
        potentials=rows[0] if single else rows,
        column_potentials=None if power == 1 else columns[0] if single else columns,
        slopes=slopes[0] if single else slopes,
        residual=residual,
        converged=residual <= tolerance,
        attained=kept is None,
        sweeps=sweeps,
        notes=(*_format_dropped_notes(rows, columns, kept), *format_convergence_notes(residual, tolerance, sweeps)),
    )


def _mask_potentials(potentials: Tensor, had: Tensor, has: Tensor) -> Tensor:
    """Return potentials with nan where all edges vanish and 0 where there were none."""
    return torch.where(has, potentials, torch.where(had, torch.nan, 0.0))


def _format_dropped_notes(rows: Tensor, columns: Tensor, kept: Tensor | None) -> tuple[str, ...]:
    if kept is None:
        return ()
    dead = [
        f"{int(side.isnan().sum())} of {side.numel()} {name}"
        for side, name in ((rows, "rows"), (columns, "columns"))
        if side.isnan().any()
    ]
    what = " and ".join(dead) if dead else "Entries between separate components"
    return (f"{what} vanish: rescaling makes them arbitrarily small. No finite scales attain the value.",)


class ColumnFlow(Flow):
    """A flow from row to row through the columns, with rows as nodes."""

    def __init__(self, log_F: Tensor, log_U: Tensor, power: float) -> None:
        self.log_F, self.log_U, self.power = log_F, log_U, power
        self.step_size = 0.5 if power == 0.5 else 0.25

    def compute_start(self) -> Tensor:
        """Return the potentials after one sweep over columns and rows from equal scales."""
        y = (self.log_U.logsumexp(1) - self.log_F.logsumexp(1)).nan_to_num()[:, None, :] / 2
        return ((self.log_U - y).logsumexp(2) - (self.log_F + y).logsumexp(2)).nan_to_num() / 2

    def make_point(self, z: Tensor) -> ColumnFlowPoint:
        """Return the flow at row potentials ``z``."""
        return ColumnFlowPoint(self.log_F, self.log_U, self.power, z)


class ColumnFlowPoint(FlowPoint):
    """The flow at given row potentials.

    Shares lie in [0, 1]. Flows have one common unit, or one unit per row where their range is too wide.
    """

    def __init__(self, log_F: Tensor, log_U: Tensor, power: float, z: Tensor) -> None:
        self.log_F, self.log_U, self.power, self.z = log_F, log_U, power, z
        self.P, self.log_a = _compute_shares(log_F + z[:, :, None], 1)
        self.Q, self.log_b = _compute_shares(log_U - z[:, :, None], 1)
        self.log_w = power * (self.log_a + self.log_b)
        top = self.log_w.amax(1, keepdim=True)
        self.sent, self.received, self.w = self.P, self.Q, (self.log_w - top).exp()
        self.log_out, self.log_in = (
            _multiply_batched(part, self.w).log().clamp(min=LOG_ZERO) + top for part in (self.P, self.Q)
        )
        self.live = self.P.amax(2) > 0
        self.unfed, self.undrained = ((shares.amax(1) == 0).to(shares) for shares in (self.P, self.Q))
        lowest = torch.where(self.live, torch.minimum(self.log_out, self.log_in), top).amin(1, keepdim=True)
        self.own_units = bool((lowest < top - MAX_LOG_RANGE).any())
        if self.own_units:
            log_P, log_Q = self._compute_log_shares()
            self.sent, self.log_out = _compute_shares(log_P + self.log_w[:, None, :], 2)
            self.received, self.log_in = _compute_shares(log_Q + self.log_w[:, None, :], 2)
            self.w = torch.ones_like(self.w)

    def _compute_log_shares(self) -> tuple[Tensor, Tensor]:
        z = self.z[:, :, None]
        return self.log_F + z - self.log_a[:, None, :], self.log_U - z - self.log_b[:, None, :]

    def compute_imbalance(self, shift: Tensor) -> Tensor:
        """Return ln(out / in) of every row at ``z + shift``."""
        up = shift.exp()
        # Columns without flow are divided by 1.
        a = _multiply_batched(self.P.mT, up).add_(self.unfed)
        b = _multiply_batched(self.Q.mT, up.reciprocal()).add_(self.undrained)
        w = self.w * (a * b if self.power == 1 else (a * b) ** self.power)
        # out = e^shift S (w / a) and in = e^-shift R (w / b)
        out, into = _multiply_batched(self.sent, w / a), _multiply_batched(self.received, w / b)
        r = out.log_().sub_(into.log_()).add_(shift, alpha=2)
        if self.own_units:
            r = r + self.log_out - self.log_in
        return torch.where(self.live, r, 0.0)

    def compute_log_flow(self) -> Tensor:
        """Return ln(out + in) of every row."""
        return torch.logaddexp(self.log_out, self.log_in).clamp(min=LOG_ZERO)

    @cached_property
    def _roots(self) -> tuple[Tensor, Tensor]:
        """Return P and Q times sqrt(w / d)."""
        scale = (self.log_w[:, None, :] - self.compute_log_flow()[:, :, None]) / 2
        log_P, log_Q = self._compute_log_shares()
        return (log_P + scale).exp(), (log_Q + scale).exp()

    def multiply_stiffness(self, v: Tensor) -> Tensor:
        """Return S v without forming S."""
        P, Q = self._roots
        p, up, down = self.power, _multiply_batched(P.mT, v), _multiply_batched(Q.mT, v)
        return v - _multiply_batched(P, (1 - p) * up + p * down) - _multiply_batched(Q, p * up + (1 - p) * down)

    def compute_stiffness(self, root: Tensor) -> Tensor:
        """Return S."""
        P, Q = self._roots
        N = (P + Q) @ (P + Q).mT / 2 if self.power == 0.5 else P @ Q.mT + Q @ P.mT
        return build_laplacian(N, root)


def _compute_shares(logs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the shares in the sum over a dimension, and its logarithm. Overwrites ``logs``."""
    top = logs.amax(dim, keepdim=True).clamp(min=LOG_ZERO)
    shares = logs.sub_(top).exp_()
    total = shares.sum(dim, keepdim=True)
    shares.div_(torch.where(total > 0, total, 1.0))
    return shares, (total.log() + top).clamp(min=LOG_ZERO).squeeze(dim)


def _multiply_batched(matrix: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(matrix, v.unsqueeze(2)).squeeze(2)
