r"""Which terms survive the infimum, and the way along which the others vanish.

A direction d with :math:`A_e \cdot d \le 0` for every term makes those with :math:`A_e \cdot d < 0` as small as one
likes, and nothing pulls back. Terms for which there is such a direction add nothing to the infimum; one direction, the
*drift*, loses them all. Lengths of rows do not matter here.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from saltflat.balance.components import find_components
from saltflat.errors import SaltflatError

Array = NDArray[np.float64]
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
