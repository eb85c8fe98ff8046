r"""A sum of exponentials of linear forms, as a flow to balance.

Term e is :math:`t_e = b_e e^{A_e \cdot z}`. Where :math:`A_{ej}` is positive, :math:`A_{ej} t_e` flows out of scale j;
where it is negative, :math:`-A_{ej} t_e` flows into it. At the minimum as much flows out of every scale as flows in.
An edge of a graph is a term with +1 at its tail and -1 at its head.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from saltflat.balance.settle import Flow, FlowPoint

Array = NDArray[np.float64]


class TermFlow(Flow):
    """Needs rows of A whose sizes add up to 2 at most, and in every column entries of both signs."""

    # All scales move at once, each by its share of the sum of sizes: for shifts x the total then only falls, because
    # exp(sum_j a_j x_j) <= sum_j |a_j| / 2 exp(2 sign(a_j) x_j) + a constant, whose minimum is at a quarter each.
    pace = 0.25

    def __init__(self, A: csr_array, log_weights: Array) -> None:
        self.A, self.log_weights = A, log_weights
        by_scale = A.T.tocsr()
        self.out, self.into = FlowSide(by_scale, 1), FlowSide(by_scale, -1)

    def compute_log_terms(self, z: Tensor) -> Array:
        return np.asarray(self.log_weights + self.A @ z[0].numpy())

    def make_point(self, z: Tensor) -> TermFlowPoint:
        return TermFlowPoint(self, z)


class FlowSide:
    """The entries of one sign, scale by scale."""

    def __init__(self, by_scale: csr_array, sign: int) -> None:
        has = sign * by_scale.data > 0
        self.shape = by_scale.shape
        self.terms = by_scale.indices[has]
        self.starts = np.append(0, np.cumsum(has))[by_scale.indptr]
        self.log_sizes = np.log(abs(by_scale.data[has]))

    def compute_flows(self, log_terms: Array) -> tuple[csr_array, Array]:
        """``(scales, terms)``, in units that every scale has for itself, and the logarithms of those.

        So no flow is too small to be seen.
        """
        logs = log_terms[self.terms] + self.log_sizes
        units = np.maximum.reduceat(logs, self.starts[:-1])
        logs -= np.repeat(units, np.diff(self.starts))
        return csr_array((np.exp(logs, out=logs), self.terms, self.starts), shape=self.shape), units


class TermFlowPoint(FlowPoint):
    def __init__(self, flow: TermFlow, z: Tensor) -> None:
        self.flow, self.z = flow, z
        self.log_terms = flow.compute_log_terms(z)
        self.out, self.out_units = flow.out.compute_flows(self.log_terms)
        self.into, self.in_units = flow.into.compute_flows(self.log_terms)

    def _compute_log_flows(self, change: Array) -> tuple[Array, Array]:
        return np.log(self.out @ change) + self.out_units, np.log(self.into @ change) + self.in_units

    def compute_imbalance(self, shift: Tensor) -> Tensor:
        log_out, log_in = self._compute_log_flows(np.exp(self.flow.A @ shift[0].numpy()))
        return torch.from_numpy(log_out - log_in)[None]

    def compute_log_flow(self) -> Tensor:
        return torch.from_numpy(np.logaddexp(*self._compute_log_flows(np.ones_like(self.log_terms))))[None]

    @cached_property
    def _root(self) -> tuple[csr_array, csr_array]:
        """M with M^T M the second derivative over the roots of the flows at both ends; its transpose."""
        A, flow = self.flow.A, self.compute_log_flow()[0].numpy()
        logs = np.repeat(self.log_terms, np.diff(A.indptr)) - flow[A.indices]
        M = csr_array((A.data * np.exp(logs / 2), A.indices, A.indptr), shape=A.shape)
        return M, M.T.tocsr()

    def multiply_stiffness(self, v: Tensor) -> Tensor:
        M, turned = self._root
        return torch.from_numpy(turned @ (M @ v[0].numpy()))[None]

    def compute_stiffness(self, root: Tensor) -> Tensor:
        M, turned = self._root
        return torch.from_numpy((turned @ M).toarray())[None]
