"""Balancing a sparse graph."""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.balance.balanced import Balanced, checked, checked_effort, unfinished
from saltflat.balance.components import components
from saltflat.balance.settle import Flow, Point, settle
from saltflat.errors import OptionError


def balance_graph(
    tails: Tensor, heads: Tensor, weights: Tensor, nodes: int, tolerance: float = 1e-10, limit: int = 10_000
) -> Balanced:
    r"""The smallest total weight of a graph when nodes scale their outgoing edges and divide their incoming ones.

    .. math::
        \min_z \sum_e b_e e^{z_{\mathrm{tail}(e)} - z_{\mathrm{head}(e)}}

    Edges from a node to itself are a constant part of the value. Potentials have a free constant in every part of the
    graph; it is chosen so that the part's first node has 0.

    Args:
        tails: ``(edges,)``, the nodes that edges leave.
        heads: ``(edges,)``, the nodes they enter.
        weights: ``(edges,)``, at least 0.
        nodes: how many there are.
        tolerance: largest ``|ln(out / in)|`` that counts as balanced.
        limit: sweeps after which to give up.

    Example:
        A cycle of D edges: D times their geometric mean, here 2 sqrt(1 * 16).

        >>> found = balance_graph(torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([1.0, 16.0]), nodes=2)
        >>> round(found.value, 9), (found.potentials / torch.tensor(2.0).log()).round().tolist()
        (8.0, [0.0, -2.0])
    """
    checked_effort(tolerance, limit)
    _check_ends(tails, heads, weights, nodes)
    weights = checked(weights, "weights")
    there = (weights > 0) & (tails != heads)
    constant = weights[tails == heads].sum()
    tails, heads, weights = (part[there] for part in (tails.long(), heads.long(), weights))
    parts = components(tails, heads, nodes)
    kept = parts[tails] == parts[heads]
    had = _touched(tails, heads, nodes)
    tails, heads, weights = (part[kept] for part in (tails, heads, weights))
    live = _touched(tails, heads, nodes)
    flow = Edges(tails, heads, weights.log(), nodes)
    z, residual, sweeps = settle(flow, weights.new_zeros(1, nodes), tolerance, limit)
    value = (flow.log_weights + z[0, tails] - z[0, heads]).exp().sum() + constant
    z = torch.where(live, _from_first(z[0], parts), torch.where(had, torch.nan, 0.0))
    notes: tuple[str, ...] = ()
    if not bool(kept.all()):
        notes = (
            f"{int((~kept).sum())} of {len(kept)} edges lie on no cycle, can be scaled towards 0 without end and add "
            "nothing; no finite scales reach the value.",
        )
    return Balanced(
        value=float(value),
        values=value[None],
        potentials=z,
        column_potentials=None,
        residual=residual,
        converged=residual <= tolerance,
        attained=bool(kept.all()),
        sweeps=sweeps,
        notes=(*notes, *unfinished(residual, tolerance, sweeps)),
    )


def _check_ends(tails: Tensor, heads: Tensor, weights: Tensor, nodes: int) -> None:
    ends = torch.cat([tails.reshape(-1), heads.reshape(-1)])
    whole = not ends.is_floating_point() and not ends.is_complex()
    inside = ends.numel() == 0 or (whole and int(ends.min()) >= 0 and int(ends.max()) < nodes)
    if not (tails.dim() == 1 and tails.shape == heads.shape == weights.shape and whole and inside):
        raise OptionError(
            f"Got tails, heads and weights of shapes {tuple(tails.shape)}, {tuple(heads.shape)} and "
            f"{tuple(weights.shape)} for {nodes} nodes. Want one of each per edge, with tails and heads integers from "
            f"0 to {nodes - 1}. Do: number the nodes from 0."
        )


def _touched(tails: Tensor, heads: Tensor, nodes: int) -> Tensor:
    touched = torch.zeros(nodes, dtype=torch.bool, device=tails.device)
    touched[tails] = True
    touched[heads] = True
    return touched


def _from_first(z: Tensor, parts: Tensor) -> Tensor:
    """Potentials as seen from the first node of the same part."""
    numbers = torch.arange(len(parts), device=parts.device)
    first = torch.full_like(parts, len(parts)).scatter_reduce(0, parts, numbers, "amin")
    return z - z[first[parts]]


class Edges(Flow):
    pace = 0.25

    def __init__(self, tails: Tensor, heads: Tensor, log_weights: Tensor, nodes: int) -> None:
        self.tails, self.heads, self.log_weights = tails, heads, log_weights
        self.live = _touched(tails, heads, nodes)

    def at(self, z: Tensor) -> EdgesPoint:
        return EdgesPoint(self, z)

    def summed(self, values: Tensor, ends: Tensor) -> Tensor:
        return values.new_zeros(len(self.live)).index_add(0, ends, values)

    def logsumexp(self, values: Tensor, ends: Tensor) -> Tensor:
        """By node; 0 where there are no edges."""
        top = values.new_zeros(len(self.live)).scatter_reduce(0, ends, values, "amax", include_self=False)
        total = self.summed((values - top[ends]).exp(), ends)
        return torch.where(self.live, total.log() + top, 0.0)


class EdgesPoint(Point):
    """Every node counts in units of its own flow here, so that no flow is too small to be seen."""

    def __init__(self, flow: Edges, z: Tensor) -> None:
        self.flow, self.z = flow, z
        self.log_edges = flow.log_weights + z[0, flow.tails] - z[0, flow.heads]
        self.log_out = flow.logsumexp(self.log_edges, flow.tails)
        self.log_in = flow.logsumexp(self.log_edges, flow.heads)
        self.given = (self.log_edges - self.log_out[flow.tails]).exp()
        self.taken = (self.log_edges - self.log_in[flow.heads]).exp()

    def imbalance(self, shift: Tensor) -> Tensor:
        flow = self.flow
        change = (shift[0, flow.tails] - shift[0, flow.heads]).exp()
        out, into = flow.summed(self.given * change, flow.tails), flow.summed(self.taken * change, flow.heads)
        r = out.log() - into.log() + self.log_out - self.log_in
        return torch.where(flow.live, r, 0.0)[None]

    def log_flow(self) -> Tensor:
        return torch.logaddexp(self.log_out, self.log_in)[None]

    @property
    def _links(self) -> Tensor:
        """Edges over the root of the flows at both ends."""
        flow = self.log_flow()[0]
        return (self.log_edges - (flow[self.flow.tails] + flow[self.flow.heads]) / 2).exp()

    def coupled(self, v: Tensor) -> Tensor:
        tails, heads, links = self.flow.tails, self.flow.heads, self._links
        return (self.flow.summed(links * v[0, heads], tails) + self.flow.summed(links * v[0, tails], heads))[None]

    def coupling(self) -> Tensor:
        nodes = len(self.flow.live)
        N = self.z.new_zeros(nodes, nodes).index_put((self.flow.tails, self.flow.heads), self._links, accumulate=True)
        return (N + N.mT)[None]
