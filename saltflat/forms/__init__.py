"""Per-example gradients of one parameter, kept factored, and what can be contracted from them.

A form stands for the array ``gradient[k, n, ...]``: for column ``k`` and example ``n`` the gradient, with respect to
one parameter, of the inner product of the column with that example's outputs. ``dense`` builds that array and is the
definition; every other method has a default made from it, which a form replaces where it knows something quicker.

The last columns may be random draws of one quantity, ``draws`` of them with equally many columns each; ``spread`` says
how far their average scatters (:mod:`saltflat.errorbars`).
"""

from saltflat.forms.base import Dense, Form, Layout
from saltflat.forms.outer import Outer
from saltflat.forms.rows import Rows

__all__ = ["Dense", "Form", "Layout", "Outer", "Rows"]
