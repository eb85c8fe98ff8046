"""The solver: what a balancing found, closed-form coordinate sweeps, and Newton's method where they converge slowly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import log
from operator import itemgetter

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from saltflat.errors import OptionError


@dataclass(frozen=True)
class BalanceResult:
    """The smallest total that rescaling can reach, and the scales that attain it.

    Attributes:
        value: the infimum, summed over groups.
        values: the infimum of each group, ``(groups,)``.
        potentials: logarithms of the scales of rows or nodes. Where edges vanish (see ``attained``), potentials are
            relative to the first row or node of each remaining component. ``nan`` for rows and nodes in no component;
            0 for those without edges.
        column_potentials: logarithms of the scales of columns, or None if columns have no scales.
        slopes: derivative of ``value`` by every entry of F, or by every edge weight; 0 for entries that vanish.
        residual: the largest ``|ln(out / in)|`` of any node, where out and in are its outflow and inflow; 0 if nothing
            flows.
        converged: whether ``residual`` is within the tolerance. If not, ``value`` is only an upper bound.
        attained: whether finite scales attain ``value``; if not, it is only approached in the limit.
        sweeps: number of updates of all potentials.
        notes: further remarks for the reader.
    """

    value: float
    values: Tensor
    potentials: Tensor
    column_potentials: Tensor | None
    slopes: Tensor
    residual: float
    converged: bool
    attained: bool
    sweeps: int
    notes: tuple[str, ...]


def check_nonnegative(values: Tensor, what: str) -> Tensor:
    """Return the values in float64, or raise an error unless all are finite and nonnegative."""
    if values.is_complex() or not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise OptionError(
            f"Expected finite nonnegative numbers, but got {what} with entries that are negative, complex or not "
            "finite. Try clamping estimates that are slightly negative."
        )
    return values.detach().to(torch.float64)


def check_solver_options(tolerance: float, limit: int) -> None:
    """Check that the tolerance and the limit on sweeps are positive."""
    if not tolerance > 0 or limit < 1:
        raise OptionError(
            f"Expected a positive tolerance and limit, but got tolerance={tolerance} and limit={limit}. Try omitting "
            "them; the default tolerance is 1e-10."
        )


def format_convergence_notes(residual: float, tolerance: float, sweeps: int) -> tuple[str, ...]:
    """Return a note if balancing did not converge."""
    if residual <= tolerance:
        return ()
    return (
        f"Balancing stopped after {sweeps} sweeps at a residual of {residual:.1e} (tolerance: {tolerance:.0e}); "
        "the value is an upper bound.",
    )


def find_components(tails: Tensor, heads: Tensor, nodes: int) -> Tensor:
    """Return the index of the strongly connected component of every node, ``(nodes,)``.

    Example:
        A cycle of two nodes, and an edge that leaves it.

        >>> parts = find_components(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), 3)
        >>> bool(parts[0] == parts[1]), bool(parts[1] == parts[2])
        (True, False)
    """
    ends = tails.cpu().numpy(), heads.cpu().numpy()
    graph = coo_array((np.ones(len(ends[0]), dtype=bool), ends), shape=(nodes, nodes))
    _, labels = connected_components(graph.tocsr(), directed=True, connection="strong")
    return torch.from_numpy(np.asarray(labels, dtype=np.int64)).to(tails.device)


def find_cyclic_entries(F: Tensor, U: Tensor) -> Tensor | None:
    """Return a mask of the entries of two matrices ``(groups, rows, columns)`` that lie on cycles.

    ``F[i, j] > 0`` is an edge from row i to column j, ``U[i, j] > 0`` one from column j to row i. Returns None if all
    nonzero entries lie on cycles. The common cases need no search.
    """
    there, back = F > 0, U > 0
    if torch.equal(there, back):  # every edge lies on a cycle of two
        return None
    # Networks have many rows and columns with edges in one direction only; removing those often suffices.
    live = (there.any(2) & back.any(2))[:, :, None] & (there.any(1) & back.any(1))[:, None, :]
    there, back = there & live, back & live
    if torch.equal(there, back):
        return live
    groups, rows, columns = F.shape
    row_nodes = torch.arange(groups * rows, device=F.device).view(groups, rows, 1).expand(F.shape)
    column_nodes = torch.arange(groups * columns, device=F.device).view(groups, 1, columns).expand(F.shape)
    column_nodes = column_nodes + groups * rows
    tails = torch.cat([row_nodes[there], column_nodes[back]])
    heads = torch.cat([column_nodes[there], row_nodes[back]])
    parts = find_components(tails, heads, groups * (rows + columns))
    return parts[row_nodes] == parts[column_nodes]


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
