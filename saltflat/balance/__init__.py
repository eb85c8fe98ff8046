r"""Matrix balancing: minimize a sum of exponentials over scales.

Given weights :math:`B_{pq} \ge 0` on the edges of a directed graph, find potentials :math:`z` that minimize

.. math::
    \sum_{pq} B_{pq} e^{z_p - z_q}.

The problem is convex, and at its minimum the outflow of every node equals its inflow. Normalized sharpness and its
printed form are this problem on two kinds of graph, one function each. The rescalings of a network lead to the more
general problem

.. math::
    \sum_e b_e e^{A_e \cdot s},

where the logarithm of every term is an arbitrary linear form of the scales; on a graph it is a difference of two.

All computations use float64. Matrices stay on their device; graphs and linear forms are solved on the CPU. Results
report the remaining imbalance.
"""

from saltflat.balance.box import balance_in_box
from saltflat.balance.exponentials import FormBalanceResult, balance_forms
from saltflat.balance.graph import balance_graph
from saltflat.balance.matrix import balance_bipartite, balance_factored
from saltflat.balance.solver import BalanceResult

__all__ = [
    "BalanceResult",
    "FormBalanceResult",
    "balance_bipartite",
    "balance_factored",
    "balance_forms",
    "balance_graph",
    "balance_in_box",
]
