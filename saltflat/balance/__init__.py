r"""Matrix balancing: the smallest total that rescaling can reach.

Given weights :math:`B_{pq} \ge 0` on the edges of a directed graph, find potentials :math:`z` that minimise

.. math::
    \sum_{pq} B_{pq} e^{z_p - z_q}.

The problem is convex, and at its minimum as much flows out of every node as flows in. Normalized sharpness and its
printed form are this problem on two kinds of graph, one function each. A network's rescalings lead to a wider one,

.. math::
    \sum_e b_e e^{A_e \cdot s},

with the logarithm of every term any linear form of the scales; a graph is the case of a difference of two.

Everything is in float64. Matrices stay on the device they are on; graphs and forms are solved on the CPU. The answer
says how far from balance it stopped.
"""

from saltflat.balance.exponentials import FormBalanceResult, balance_forms
from saltflat.balance.graph import balance_graph
from saltflat.balance.matrix import balance_bipartite, balance_factored
from saltflat.balance.result import BalanceResult

__all__ = [
    "BalanceResult",
    "FormBalanceResult",
    "balance_bipartite",
    "balance_factored",
    "balance_forms",
    "balance_graph",
]
