"""Factored per-example gradients of one parameter, and their contractions.

A factored gradient represents the array ``gradient[k, n, ...]``: for column ``k`` and example ``n``, the gradient with
respect to one parameter of the inner product of the column with that example's outputs. ``to_dense`` computes that
array and is the definition. Every other method has a default based on it, which a class overrides if it has a faster
formula.

The last columns may be random draws of one quantity, ``draws`` of them with equally many columns each;
``compute_spread`` estimates the scatter of their average (:mod:`saltflat.results.jackknife`).
"""

from saltflat.gradients.base import ColumnLayout, DenseGradient, FactoredGradient
from saltflat.gradients.outer import OuterProductGradient
from saltflat.gradients.rows import RowSparseGradient

__all__ = ["ColumnLayout", "DenseGradient", "FactoredGradient", "OuterProductGradient", "RowSparseGradient"]
