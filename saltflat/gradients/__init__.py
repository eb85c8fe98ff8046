"""Per-example gradients of one parameter, kept factored, and what can be contracted from them.

A form stands for the array ``gradient[k, n, ...]``: for column ``k`` and example ``n`` the gradient, with respect to
one parameter, of the inner product of the column with that example's outputs. ``to_dense`` builds that array and is the
definition; every other method has a default made from it, which a form replaces where it knows something quicker.

The last columns may be random draws of one quantity, ``draws`` of them with equally many columns each;
``compute_spread`` says how far their average scatters (:mod:`saltflat.results.jackknife`).
"""

from saltflat.gradients.base import ColumnLayout, DenseGradient, FactoredGradient
from saltflat.gradients.outer import OuterProductGradient
from saltflat.gradients.rows import RowSparseGradient

__all__ = ["ColumnLayout", "DenseGradient", "FactoredGradient", "OuterProductGradient", "RowSparseGradient"]
