"""Balance a sparse graph."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from saltflat.balance.exponentials import balance_forms
from saltflat.balance.solver import BalanceResult, find_components, format_convergence_notes
from saltflat.errors import OptionError


def balance_graph(
    tails: Tensor, heads: Tensor, weights: Tensor, nodes: int, tolerance: float = 1e-10, limit: int = 10_000
) -> BalanceResult:
    r"""Minimize the total weight of a graph whose nodes multiply outgoing edges and divide incoming ones by a scale.

    .. math::
        \min_z \sum_e b_e e^{z_{\mathrm{tail}(e)} - z_{\mathrm{head}(e)}}

    Self-loops contribute a constant to the value. Potentials are determined up to a constant in every component of the
    graph; it is chosen such that the first node of the component has potential 0.

    Args:
        tails: ``(edges,)``, the nodes that edges leave.
        heads: ``(edges,)``, the nodes they enter.
        weights: ``(edges,)``, nonnegative.
        nodes: number of nodes.
        tolerance: largest ``|ln(out / in)|`` that counts as balanced.
        limit: maximum number of sweeps.

    Example:
        A cycle of D edges: D times their geometric mean, here 2 sqrt(1 * 16).

        >>> found = balance_graph(torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([1.0, 16.0]), nodes=2)
        >>> round(found.value, 9), (found.potentials / torch.tensor(2.0).log()).round().tolist()
        (8.0, [0.0, -2.0])
    """
    _check_edges(tails, heads, weights, nodes)
    numbers = np.arange(len(tails)).repeat(2)
    ends = torch.stack([tails, heads], 1).cpu().numpy().reshape(-1)
    forms = csr_array((np.tile([1.0, -1.0], len(tails)), (numbers, ends)), shape=(len(tails), nodes))
    found = balance_forms(forms, weights, tolerance, limit)
    tails, heads, there = tails.long(), heads.long(), (weights > 0) & (tails != heads)
    kept = there & ~torch.from_numpy(found.vanishing).to(there.device)
    z = torch.from_numpy(found.potentials).to(weights.device)
    z = _shift_to_first_node(z, find_components(tails[kept], heads[kept], nodes))
    had, live = (
        _find_touched_nodes(tails[there], heads[there], nodes),
        _find_touched_nodes(tails[kept], heads[kept], nodes),
    )
    notes: tuple[str, ...] = ()
    if not found.attained:
        notes = (
            f"{int(found.vanishing.sum())} of {int(there.sum())} edges lie on no cycle: rescaling makes them "
            "arbitrarily small. No finite scales attain the value.",
        )
    return BalanceResult(
        value=found.value,
        values=z.new_tensor([found.value]),
        potentials=torch.where(live, z, torch.where(had, torch.nan, 0.0)),
        column_potentials=None,
        slopes=torch.where(kept | (tails == heads), (z[tails] - z[heads]).exp(), 0.0),
        residual=found.residual,
        converged=found.converged,
        attained=found.attained,
        sweeps=found.sweeps,
        notes=(*notes, *format_convergence_notes(found.residual, tolerance, found.sweeps)),
    )


def _check_edges(tails: Tensor, heads: Tensor, weights: Tensor, nodes: int) -> None:
    ends = torch.cat([tails.reshape(-1), heads.reshape(-1)])
    whole = not ends.is_floating_point() and not ends.is_complex()
    inside = ends.numel() == 0 or (whole and int(ends.min()) >= 0 and int(ends.max()) < nodes)
    if not (tails.dim() == 1 and tails.shape == heads.shape == weights.shape and whole and inside):
        raise OptionError(
            f"Expected one tail, head and weight per edge, with integers from 0 to {nodes - 1} as tails and heads, but "
            f"got tails, heads and weights of shapes {tuple(tails.shape)}, {tuple(heads.shape)} and "
            f"{tuple(weights.shape)} for {nodes} nodes. Try numbering the nodes from 0."
        )


def _find_touched_nodes(tails: Tensor, heads: Tensor, nodes: int) -> Tensor:
    touched = torch.zeros(nodes, dtype=torch.bool, device=tails.device)
    touched[tails] = True
    touched[heads] = True
    return touched


def _shift_to_first_node(z: Tensor, parts: Tensor) -> Tensor:
    """Return potentials relative to the first node of the same component."""
    numbers = torch.arange(len(parts), device=parts.device)
    first = torch.full_like(parts, len(parts)).scatter_reduce(0, parts, numbers, "amin")
    return z - z[first[parts]]
