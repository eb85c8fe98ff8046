"""Measure how flat a trained network's minimum is, with measures that rescaling its weights cannot fool."""

from saltflat import _startup as _startup  # isort: split

import random as _random
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saltflat.audit.audit import audit_invariance as audit_invariance
    from saltflat.bounds.certify_error import certify_error as certify_error
    from saltflat.bounds.compute import compute_bounds as compute_bounds
    from saltflat.bounds.feature_robustness import feature_robustness as feature_robustness
    from saltflat.engine.certificate import certify as certify
    from saltflat.errors import SaltflatError as SaltflatError
    from saltflat.landscape.landscape import compute_landscape as compute_landscape
    from saltflat.measures.catalog import list_measures as list_measures
    from saltflat.measures.compute import measure as measure
    from saltflat.measures.compute import plan as plan
    from saltflat.measures.meter import Meter as Meter
    from saltflat.results.comparison import compare as compare
    from saltflat.results.report import Report as Report
    from saltflat.spectrum.compute import compute_spectrum as compute_spectrum
    from saltflat.spectrum.eigenvalues import compute_eigenvalues as compute_eigenvalues
    from saltflat.statistics.compute import compute_statistics as compute_statistics
    from saltflat.studies.study import Study as Study
    from saltflat.symmetry.find import find_symmetries as find_symmetries
    from saltflat.symmetry.fold import fold as fold
    from saltflat.symmetry.minimize import rebalance as rebalance
    from saltflat.symmetry.rescale import rescale as rescale

__version__ = "0.2.0"

# Where each public name is defined. Names are loaded on first use, so that importing saltflat costs next to nothing.
_HOMES = {
    "Meter": "saltflat.measures.meter",
    "Report": "saltflat.results.report",
    "SaltflatError": "saltflat.errors",
    "Study": "saltflat.studies.study",
    "audit_invariance": "saltflat.audit.audit",
    "certify": "saltflat.engine.certificate",
    "certify_error": "saltflat.bounds.certify_error",
    "compare": "saltflat.results.comparison",
    "compute_bounds": "saltflat.bounds.compute",
    "compute_eigenvalues": "saltflat.spectrum.eigenvalues",
    "compute_landscape": "saltflat.landscape.landscape",
    "compute_spectrum": "saltflat.spectrum.compute",
    "compute_statistics": "saltflat.statistics.compute",
    "feature_robustness": "saltflat.bounds.feature_robustness",
    "find_symmetries": "saltflat.symmetry.find",
    "fold": "saltflat.symmetry.fold",
    "list_measures": "saltflat.measures.catalog",
    "measure": "saltflat.measures.compute",
    "plan": "saltflat.measures.compute",
    "rebalance": "saltflat.symmetry.minimize",
    "rescale": "saltflat.symmetry.rescale",
}
_MODULES = (
    "audit",
    "bounds",
    "datasets",
    "errors",
    "integrations",
    "landscape",
    "layers",
    "measures",
    "render",
    "results",
    "spectrum",
    "statistics",
    "studies",
    "symmetry",
    "training",
)
__all__ = [
    "Meter",
    "Report",
    "SaltflatError",
    "Study",
    "audit_invariance",
    "certify",
    "certify_error",
    "compare",
    "compute_bounds",
    "compute_eigenvalues",
    "compute_landscape",
    "compute_spectrum",
    "compute_statistics",
    "feature_robustness",
    "find_symmetries",
    "fold",
    "list_measures",
    "measure",
    "plan",
    "rebalance",
    "rescale",
]


def __getattr__(name: str) -> Any:
    """Load a public name, or a public module, on first use."""
    if name in _HOMES:
        drawn = _random.getstate()  # rich draws a number while it is imported
        try:
            value = getattr(_import_module(_HOMES[name]), name)
        finally:
            _random.setstate(drawn)
        globals()[name] = value
        return value
    if name in _MODULES:
        return _import_module(f"saltflat.{name}")
    raise AttributeError(f"module 'saltflat' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted([*__all__, *_MODULES, "__version__"])
