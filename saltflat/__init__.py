"""How flat a trained network's minimum is, without being fooled by rescaling."""

__version__ = "0.1.0"

from saltflat.catalogue import catalogue
from saltflat.certificate import certify
from saltflat.eigenvalues import eigenvalues_of
from saltflat.errors import SaltflatError
from saltflat.measuring import measure
from saltflat.report import Report, compare
from saltflat.sweep import statistics_of
from saltflat.symmetry.audit import audit
from saltflat.symmetry.canonical import canonical, same_up_to_rescaling
from saltflat.symmetry.fold import fold
from saltflat.symmetry.graph import symmetries
from saltflat.symmetry.rebalance import rebalance
from saltflat.symmetry.rescale import rescale

__all__ = [
    "Report",
    "SaltflatError",
    "audit",
    "canonical",
    "catalogue",
    "certify",
    "compare",
    "eigenvalues_of",
    "fold",
    "measure",
    "rebalance",
    "rescale",
    "same_up_to_rescaling",
    "statistics_of",
    "symmetries",
]
