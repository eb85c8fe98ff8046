r"""Balance two matrices against each other with scales that must stay in a box.

The sum over the entries of :math:`F_{ij} e^{x_i + y_j} + U_{ij} e^{-x_i - y_j}` is convex, and in one row's potential
alone its minimum is in closed form: clipped to the box, it is the minimum in the box. So rows and columns take turns;
where that is slow, Newton steps in the potentials that are not at the border follow. In a box there always is a
minimum, also for rows that only F or only U have.
"""

from __future__ import annotations

from math import inf, log
from operator import itemgetter

import torch
from torch import Tensor

from saltflat.balance.solver import (
    MAX_REMAINING_SWEEPS,
    SWEEPS_PER_ROUND,
    BalanceResult,
    check_nonnegative,
    check_solver_options,
    format_convergence_notes,
)
from saltflat.errors import OptionError
from saltflat.validation import check_positive

MAX_ROWS = 2048  # rows, or columns if these are fewer, up to which Newton steps are taken
SETTLING = 2  # sweeps after a Newton step, which find new potentials at the border
RIDGE = 1e-12  # relative to the diagonal: shifting all rows against all columns changes nothing


def balance_in_box(F: Tensor, U: Tensor, radius: float, tolerance: float = 1e-10, limit: int = 10_000) -> BalanceResult:
    r"""Minimize the sum of two matrices, one multiplied and the other divided by scales of limited size.

    .. math::
        \min_{|x_i| \le r, \, |y_j| \le r} \sum_{ij} F_{ij} e^{x_i + y_j} + U_{ij} e^{-x_i - y_j}

    A potential is balanced if the flow out of its node equals that into it, or if it is at the border and the flows
    push it outward.

    Args:
        F: ``(rows, columns)`` or ``(groups, rows, columns)``, nonnegative; every group is a separate problem.
        U: of the same shape.
        radius: r, the largest potential in size.
        tolerance: largest ``|ln(out / in)|`` that counts as balanced.
        limit: maximum number of sweeps.

    Example:
        Without the box, :math:`x + y = \ln(64) / 2` and the sum is 16. In the box, 1 * 4 + 64 / 4.

        >>> found = balance_in_box(torch.tensor([[1.0]]), torch.tensor([[64.0]]), radius=log(2))
        >>> round(found.value, 9), found.converged
        (20.0, True)
    """
    check_positive(radius=radius)
    check_solver_options(tolerance, limit)
    if F.shape != U.shape or F.dim() not in (2, 3):
        raise OptionError(
            "Expected two matrices of the same shape, (rows, columns) or (groups, rows, columns), but got shapes "
            f"{tuple(F.shape)} and {tuple(U.shape)}. Try summing a convolution over its kernel positions first."
        )
    single = F.dim() == 2
    F, U = (check_nonnegative(matrix, name) for matrix, name in ((F, "F"), (U, "U")))
    F, U = (F[None], U[None]) if single else (F, U)
    # Newton's method eliminates the columns, so there should be more of them than rows.
    turned = F.shape[1] > F.shape[2]
    problem = _BoxProblem(F.mT if turned else F, U.mT if turned else U, radius)
    x, y, residual, sweeps = problem.solve(tolerance, limit)
    x, y = (y, x) if turned else (x, y)
    sums = x[:, :, None] + y[:, None, :]
    values = ((F.log() + sums).exp() + (U.log() - sums).exp()).sum((1, 2))
    slopes = torch.where(F > 0, sums.exp(), 0.0)
    return BalanceResult(
        value=float(values.sum()),
        values=values,
        potentials=x[0] if single else x,
        column_potentials=y[0] if single else y,
        slopes=slopes[0] if single else slopes,
        residual=residual,
        converged=residual <= tolerance,
        attained=True,
        sweeps=sweeps,
        notes=format_convergence_notes(residual, tolerance, sweeps),
    )


class _BoxProblem:
    """Two matrices as logarithms, and the box."""

    def __init__(self, F: Tensor, U: Tensor, radius: float) -> None:
        self.log_F, self.log_U, self.radius = F.log(), U.log(), radius

    def solve(self, tolerance: float, limit: int) -> tuple[Tensor, Tensor, float, int]:
        """Return the best potentials of rows and columns found, their residual, and the number of sweeps."""
        x, y = self.log_F.new_zeros(self.log_F.shape[:2]), self.log_F.new_zeros(self.log_F.shape[::2])
        if not self.log_F.numel():
            return x, y, 0.0, 0
        residual, sweeps = self.compute_residual(x, y), 0
        best = x, y, residual
        while residual > tolerance and sweeps < limit:
            before, done = residual, min(SWEEPS_PER_ROUND, limit - sweeps)
            x, y, residual = self._run_sweeps(x, y, done)
            sweeps += done
            best = min(best, (x, y, residual), key=itemgetter(2))
            improving = residual > tolerance and x.shape[1] <= MAX_ROWS
            # Not >=: the rate is nan while nothing is known of the residual but that it is infinite.
            improving = improving and not log(before / residual) / done * MAX_REMAINING_SWEEPS >= log(
                residual / tolerance
            )
            while improving and residual > tolerance and sweeps < limit:
                before = residual
                x, y, residual = self._run_sweeps(*self._take_newton_step(x, y), SETTLING)
                sweeps += SETTLING
                best = min(best, (x, y, residual), key=itemgetter(2))
                improving = residual < before
        return *best, sweeps

    def _run_sweeps(self, x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
        for _ in range(count):
            y = self._center(y, 1, x[:, :, None])
            x = self._center(x, 2, y[:, None, :])
        return x, y, self.compute_residual(x, y)

    def compute_residual(self, x: Tensor, y: Tensor) -> float:
        """Return the largest ``|ln(out / in)|`` of a potential that is free to follow it."""
        rows, columns = self._compute_imbalance(2, y[:, None, :], x), self._compute_imbalance(1, x[:, :, None], y)
        return max(float(self._drop_outward(r, z).abs().max()) for r, z in ((rows, x), (columns, y)))

    def _compute_flows(self, axis: int, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the sums of F and U over an axis, at the other side's potentials."""
        return (self.log_F + other).logsumexp(axis), (self.log_U - other).logsumexp(axis)

    def _center(self, z: Tensor, axis: int, other: Tensor) -> Tensor:
        """Return the best potentials of one side, given the other side's; those without any flow stay."""
        out, into = self._compute_flows(axis, other)
        silent = (out == -inf) & (into == -inf)
        best = ((into - out) / 2).clamp(-self.radius, self.radius)
        return torch.where(silent, z, best)

    def _compute_imbalance(self, axis: int, other: Tensor, z: Tensor) -> Tensor:
        out, into = self._compute_flows(axis, other)
        silent = (out == -inf) & (into == -inf)
        return torch.where(silent, 0.0, out - into + 2 * z)

    def _drop_outward(self, slope: Tensor, z: Tensor) -> Tensor:
        """Return slopes with 0 where a potential is at the border and descent would leave the box."""
        stuck = ((z >= self.radius) & (slope < 0)) | ((z <= -self.radius) & (slope > 0))
        return torch.where(stuck, 0.0, slope)

    def _take_newton_step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the potentials after a Newton step of those that are free, shortened until the sum is smaller."""
        rows = x.shape[1]
        sums = x[:, :, None] + y[:, None, :]
        up, down = self.log_F + sums, self.log_U - sums
        top = torch.maximum(up.amax((1, 2), keepdim=True), down.amax((1, 2), keepdim=True)).clamp_min(-1e300)
        P, Q = (up - top).exp(), (down - top).exp()
        S, z = P + Q, torch.cat([x, y], 1)
        slope = torch.cat([(P - Q).sum(2), (P - Q).sum(1)], 1)
        size = torch.cat([S.sum(2), S.sum(1)], 1)
        free = (self._drop_outward(slope, z) != 0).to(S)
        root = torch.where(size > 0, size, 1.0).sqrt()
        # The second derivative over the roots of its diagonal, and the identity in what is not free.
        link = S / root[:, :rows, None] / root[:, None, rows:] * free[:, :rows, None] * free[:, None, rows:]
        b = -slope * free / root
        bent = torch.eye(rows, dtype=S.dtype, device=S.device) * (1 + RIDGE) - link @ link.mT
        factor, failed = torch.linalg.cholesky_ex(bent)
        if bool(failed.any()):
            return x, y
        a = torch.cholesky_solve(b[:, :rows, None] - link @ b[:, rows:, None], factor)
        step = torch.cat([a, b[:, rows:, None] - link.mT @ a], 1)[:, :, 0] / root
        best, scale = S.sum((1, 2)), torch.ones_like(z[:, :1])
        # The fraction of the step at which a potential meets the border: from there on, others would move without it.
        room = torch.where(step == 0, inf, (self.radius * step.sign() - z) / torch.where(step == 0, 1.0, step))
        shorter = room.amin(1, keepdim=True)
        shorter = torch.where(shorter < 1, shorter, 0.25)
        for _ in range(6):
            there = (z + scale * step).clamp(-self.radius, self.radius)
            moved = there[:, :rows, None] + there[:, None, rows:]
            value = ((self.log_F + moved - top).exp() + (self.log_U - moved - top).exp()).sum((1, 2))
            worse = ~(value <= best)
            if not bool(worse.any()):
                break
            scale = torch.where(worse[:, None], shorter, scale)
            shorter = shorter / 4
        kept = torch.where(worse[:, None], z, there)
        return kept[:, :rows], kept[:, rows:]
