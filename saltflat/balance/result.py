"""What a balancing found, and which terms survive the infimum."""

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
    """The smallest total that rescaling can reach, and the scales that reach it.

    Attributes:
        value: the infimum, summed over groups.
        values: the same by group, ``(groups,)``.
        potentials: logarithms of the scales: of the rows, or of the nodes. Where edges had to be dropped (see
            ``attained``) the parts that remain drift apart without end; inside each part the first row or node has
            0. ``nan`` for what belongs to no part; 0 for what has no edges at all.
        column_potentials: logarithms of the columns' scales, where columns have some.
        slopes: derivative of ``value`` by every entry of F, or weight of an edge; 0 for those that add nothing.
        residual: the largest ``|ln(out / in)|`` of any node, with what flows out of it and into it; 0 if nothing flows.
        converged: whether ``residual`` is within the tolerance. If not, ``value`` is only an upper bound.
        attained: whether some finite scales reach ``value``; if not, they only come as close to it as one likes.
        sweeps: how often all potentials were updated.
        notes: what a reader should know besides.
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
    """In float64, if all are finite and at least 0."""
    if values.is_complex() or not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise OptionError(
            f"Expected finite numbers of at least 0, but got {what} with entries that are negative, complex or not "
            "finite. Try clamping what an estimate made negative, and look where the others come from."
        )
    return values.detach().to(torch.float64)


def check_solver_options(tolerance: float, limit: int) -> None:
    if not tolerance > 0 or limit < 1:
        raise OptionError(
            f"Expected both above 0, but got tolerance={tolerance} and limit={limit}. Try leaving them out; 1e-10 is "
            "usual."
        )


def format_convergence_notes(residual: float, tolerance: float, sweeps: int) -> tuple[str, ...]:
    if residual <= tolerance:
        return ()
    return (
        f"Balancing stopped after {sweeps} sweeps at a residual of {residual:.1e} (wanted: {tolerance:.0e}); "
        "the value is an upper bound.",
    )


def find_components(tails: Tensor, heads: Tensor, nodes: int) -> Tensor:
    """``(nodes,)``: the number of the strongly connected component of every node.

    Example:
        A cycle of two, and an edge that leaves it.

        >>> parts = find_components(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), 3)
        >>> bool(parts[0] == parts[1]), bool(parts[1] == parts[2])
        (True, False)
    """
    ends = tails.cpu().numpy(), heads.cpu().numpy()
    graph = coo_array((np.ones(len(ends[0]), dtype=bool), ends), shape=(nodes, nodes))
    _, labels = connected_components(graph.tocsr(), directed=True, connection="strong")
    return torch.from_numpy(np.asarray(labels, dtype=np.int64)).to(tails.device)


def find_cyclic_entries(F: Tensor, U: Tensor) -> Tensor | None:
    """Which entries of two matrices ``(groups, rows, columns)`` lie on cycles; None for all that are not 0.

    ``F[i, j] > 0`` is an edge from row i to column j, ``U[i, j] > 0`` one from column j to row i. The common cases
    need no search.
    """
    there, back = F > 0, U > 0
    if torch.equal(there, back):  # every edge lies on a cycle of two
        return None
    # Networks have many rows and columns with edges in one direction only, and often no other trouble.
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
