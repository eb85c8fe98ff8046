r"""The solver: closed-form coordinate sweeps, and Newton steps where sweeps converge slowly.

A node's *imbalance* is :math:`r_p = \ln(\mathrm{out}_p / \mathrm{in}_p)`. Lowering its potential by
:math:`r_p / 2` balances it exactly (Osborne, 1960). Repeated sweeps never increase the distance to the solution,
however badly the weights are scaled, but converge slowly where groups of nodes are only weakly connected. There
Newton's method moves each group as a whole: on a graph the second derivative is a Laplacian,
:math:`\mathrm{diag}(d) - W` with :math:`d = \mathrm{out} + \mathrm{in}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log
from operator import itemgetter

import torch
from torch import Tensor

# Larger shifts are moved into a new point of expansion, so that no exponential comes near overflow.
MAX_SHIFT = 20.0
# Sweeps between two checks of the rate of convergence.
SWEEPS_PER_ROUND = 20
# Newton steps take over if more than this many further sweeps would be needed.
MAX_REMAINING_SWEEPS = 100
# Laplacians with up to this many entries are factorized; larger ones are solved by conjugate gradients.
MAX_DENSE_ENTRIES = 2**22


class FlowPoint(ABC):
    """The flow at given potentials ``z``, ``(groups, nodes)``."""

    z: Tensor

    @abstractmethod
    def compute_imbalance(self, shift: Tensor) -> Tensor:
        """Return ln(out / in) at ``z + shift``, ``(groups, nodes)``; 0 where nothing flows."""

    @abstractmethod
    def compute_log_flow(self) -> Tensor:
        """Return ln(out + in), ``(groups, nodes)``."""

    @abstractmethod
    def multiply_stiffness(self, v: Tensor) -> Tensor:
        """Return S v, ``(groups, nodes)``, where S is the second derivative over ``sqrt(d[p] d[q])``."""

    @abstractmethod
    def compute_stiffness(self, root: Tensor) -> Tensor:
        """Return S, ``(groups, nodes, nodes)``, given sqrt(d) up to a constant factor."""


class Flow(ABC):
    """A problem to balance."""

    # Share of its imbalance by which a sweep lowers a potential: 1/2 if nodes do not affect each other, else 1/4.
    step_size: float

    @abstractmethod
    def make_point(self, z: Tensor) -> FlowPoint:
        """Return the flow at potentials ``z``."""


def balance_flow(flow: Flow, z: Tensor, tolerance: float, limit: int) -> tuple[Tensor, float, int]:
    """Return the best potentials found, their largest imbalance, and the number of sweeps including Newton steps."""
    point = flow.make_point(z)
    residual = _compute_residual(point.compute_imbalance(torch.zeros_like(z)))
    best = point.z, residual
    sweeps = 0
    while residual > tolerance and sweeps < limit:
        before = residual
        point, residual, done = _run_sweeps(flow, point, tolerance, min(SWEEPS_PER_ROUND, limit - sweeps))
        sweeps += done
        best = min(best, (point.z, residual), key=itemgetter(1))
        slow = residual > tolerance and log(before / residual) / done * MAX_REMAINING_SWEEPS < log(residual / tolerance)
        while slow and residual > tolerance and sweeps < limit:
            moved = _take_newton_step(flow, point, residual, tolerance / 1000)
            sweeps += 1
            if moved is None:
                break
            point, residual = moved
            best = min(best, (point.z, residual), key=itemgetter(1))
    return *best, sweeps


def _compute_residual(imbalance: Tensor) -> float:
    return float(imbalance.abs().max()) if imbalance.numel() else 0.0


def _run_sweeps(flow: Flow, point: FlowPoint, tolerance: float, count: int) -> tuple[FlowPoint, float, int]:
    """Return the point after at most ``count`` sweeps, the remaining imbalance and the number of sweeps made."""
    shift = torch.zeros_like(point.z)
    r = point.compute_imbalance(shift)
    done = 0
    while done < count and _compute_residual(r) > tolerance:
        shift = shift - flow.step_size * r
        if _compute_residual(shift) > MAX_SHIFT:
            point = flow.make_point(point.z + shift)
            shift = torch.zeros_like(shift)
        r = point.compute_imbalance(shift)
        done += 1
    point = flow.make_point(point.z + shift)
    return point, _compute_residual(point.compute_imbalance(torch.zeros_like(shift))), done


def _take_newton_step(flow: Flow, point: FlowPoint, residual: float, noise: float) -> tuple[FlowPoint, float] | None:
    """Take one Newton step, shortened until it reduces the residual; return None if no step does."""
    step = _compute_newton_step(point, noise)
    for _ in range(6):
        there, worst, _ = _run_sweeps(flow, flow.make_point(point.z + step.clamp(-MAX_SHIFT, MAX_SHIFT)), 0.0, 2)
        if worst < max(residual, 0.1):
            return there, worst
        step = step / 4
    return None


def _compute_newton_step(point: FlowPoint, noise: float) -> Tensor:
    r = point.compute_imbalance(torch.zeros_like(point.z))
    # Rounding errors must not move weakly connected nodes.
    r = torch.where(r.abs() > noise, r, 0.0)
    flow = point.compute_log_flow()
    root = ((flow - flow.amax(1, keepdim=True)) / 2).exp()
    root = torch.where(root > 0, root, 1.0)
    # out - in = (out + in) tanh(r / 2)
    want = -root * (r / 2).tanh()
    groups, nodes = want.shape
    step = (
        _solve_by_cholesky(point, root, want)
        if groups * nodes * nodes <= MAX_DENSE_ENTRIES
        else _solve_by_conjugate_gradients(point, want)
    )
    return step / root


def build_laplacian(N: Tensor, root: Tensor) -> Tensor:
    """Return 1 - N, where N holds the links of a graph over the roots of the flows at both ends."""
    N.diagonal(dim1=1, dim2=2).zero_()
    # The diagonal of a Laplacian is the sum of the rest of its row. Computed as this sum it is accurate to the last
    # digit, however small the links; computed as a difference it would not be.
    return torch.diag_embed((N @ root[:, :, None])[:, :, 0] / root) - N


def _solve_by_cholesky(point: FlowPoint, root: Tensor, want: Tensor) -> Tensor:
    S = point.compute_stiffness(root)
    one = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    # A Laplacian is singular; links below the smallest ridge do not affect any relevant imbalance.
    for ridge in (1e-13, 1e-12, 1e-11, 1e-10):
        factor, failed = torch.linalg.cholesky_ex(S + ridge * one)
        if not bool(failed.any()):
            return torch.cholesky_solve(want[:, :, None], factor)[:, :, 0]
    return torch.zeros_like(want)


def _solve_by_conjugate_gradients(point: FlowPoint, want: Tensor, iterations: int = 500) -> Tensor:
    x = torch.zeros_like(want)
    rest = direction = want
    power = (rest * rest).sum(1, keepdim=True)
    enough = 1e-6 * power
    for _ in range(iterations):
        if bool((power <= enough).all()):
            break
        image = point.multiply_stiffness(direction)
        stiffness = (direction * image).sum(1, keepdim=True)
        length = torch.where(stiffness > 0, power / stiffness, 0.0)
        x = x + length * direction
        rest = rest - length * image
        power, last = (rest * rest).sum(1, keepdim=True), power
        direction = rest + torch.where(last > 0, power / last, 0.0) * direction
    return x
