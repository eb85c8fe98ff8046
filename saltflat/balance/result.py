"""Results of balancing, input checks, and the entries that survive the infimum."""

from __future__ import annotations

from dataclasses import dataclass

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
