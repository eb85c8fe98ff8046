"""How flat a trained network's minimum is, without being fooled by rescaling."""

__version__ = "0.1.0"

from saltflat import _startup as _startup  # isort: split

from typing import Any

from saltflat.catalogue import catalogue
from saltflat.certificate import certify
from saltflat.eigenvalues import eigenvalues_of
from saltflat.errors import SaltflatError
from saltflat.landscape import landscape
from saltflat.measuring import measure
from saltflat.report import Report, compare
from saltflat.spectrum import spectrum
from saltflat.studies.study import Study
from saltflat.sweep import statistics_of
from saltflat.symmetry.audit import audit
from saltflat.symmetry.fold import fold
from saltflat.symmetry.graph import symmetries
from saltflat.symmetry.rebalance import rebalance
from saltflat.symmetry.rescale import rescale

__all__ = [
    "Report",
    "SaltflatError",
    "Study",
    "audit",
    "catalogue",
    "certify",
    "compare",
    "eigenvalues_of",
    "fold",
    "landscape",
    "measure",
    "rebalance",
    "rescale",
    "spectrum",
    "statistics_of",
    "symmetries",
]


def __getattr__(name: str) -> Any:
    """Names that have moved are still found where they were."""
    if name in ("canonical", "same_up_to_rescaling"):
        from saltflat import symmetry

        return getattr(symmetry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
