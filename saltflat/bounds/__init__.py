"""Bounds: upper limits on the error on new data that hold with a stated probability, and what they rest on."""

from saltflat.bounds.bound import Assumption, Bound
from saltflat.bounds.pac_bayes import (
    MonteCarlo,
    bound_catoni,
    bound_linear,
    bound_maurer,
    bound_mcallester,
    bound_monte_carlo,
    choose_strength,
    compute_binary_kl,
    compute_gaussian_kl,
    invert_binary_kl,
    make_grid,
)

__all__ = [
    "Assumption",
    "Bound",
    "MonteCarlo",
    "bound_catoni",
    "bound_linear",
    "bound_maurer",
    "bound_mcallester",
    "bound_monte_carlo",
    "choose_strength",
    "compute_binary_kl",
    "compute_gaussian_kl",
    "invert_binary_kl",
    "make_grid",
]
