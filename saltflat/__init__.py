"""How flat a trained network's minimum is, without being fooled by rescaling."""

__version__ = "0.1.0"

from saltflat import _startup as _startup  # isort: split

from typing import Any

from saltflat.catalogue import list_measures
from saltflat.certificate import certify
from saltflat.eigenvalues import compute_eigenvalues
from saltflat.errors import SaltflatError
from saltflat.landscape import compute_landscape
from saltflat.measuring import measure
from saltflat.report import Report, compare
from saltflat.spectrum import compute_spectrum
from saltflat.studies.study import Study
from saltflat.sweep import compute_statistics
from saltflat.symmetry.audit import audit_invariance
from saltflat.symmetry.fold import fold
from saltflat.symmetry.graph import find_symmetries
from saltflat.symmetry.rebalance import rebalance
from saltflat.symmetry.rescale import rescale

__all__ = [
    "Report",
    "SaltflatError",
    "Study",
    "audit_invariance",
    "certify",
    "compare",
    "compute_eigenvalues",
    "compute_landscape",
    "compute_spectrum",
    "compute_statistics",
    "find_symmetries",
    "fold",
    "list_measures",
    "measure",
    "rebalance",
    "rescale",
]


def __getattr__(name: str) -> Any:
    """Names that have moved are still found where they were."""
    if name in ("canonicalize", "equal_up_to_rescaling"):
        from saltflat import symmetry

        return getattr(symmetry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
