"""Bounds: upper limits on the error on new data that hold with a stated probability, and what they rest on.

``compute_bounds`` evaluates the registered bounds on a network and its training data, each a function in the file of
its paper:

    @bound(reference="tsuzuku2020normalized", formula="risk + ...")
    def my_bound(evidence: Evidence, *, constant: float = 2.0) -> BoundResult:
        return BoundResult(value, terms, assumptions)
"""

from importlib import import_module
from pkgutil import iter_modules

from saltflat.bounds.bound import Assumption, Bound
from saltflat.bounds.compute import Bounds, compute_bounds
from saltflat.bounds.distributions import compute_gaussian_kl
from saltflat.bounds.jia import bound_information, compute_information_term, compute_soft_fisher
from saltflat.bounds.pac_bayes import (
    MonteCarlo,
    bound_catoni,
    bound_linear,
    bound_maurer,
    bound_mcallester,
    bound_monte_carlo,
    choose_strength,
    compute_binary_kl,
    invert_binary_kl,
    make_grid,
)
from saltflat.bounds.registry import BOUNDS, BoundResult

__all__ = [
    "BOUNDS",
    "Assumption",
    "Bound",
    "BoundResult",
    "Bounds",
    "MonteCarlo",
    "bound_catoni",
    "bound_information",
    "bound_linear",
    "bound_maurer",
    "bound_mcallester",
    "bound_monte_carlo",
    "choose_strength",
    "compute_binary_kl",
    "compute_bounds",
    "compute_gaussian_kl",
    "compute_information_term",
    "compute_soft_fisher",
    "invert_binary_kl",
    "make_grid",
]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
