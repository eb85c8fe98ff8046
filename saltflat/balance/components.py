"""Which edges survive the infimum: those that lie on a cycle.

An edge between two strongly connected components can be made as light as one likes by moving the components apart, and
nothing pulls them back. Its share of the infimum is 0, and no finite potentials reach that.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor


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
