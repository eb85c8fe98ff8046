"""Train many networks, keep every run, and see which measures go with the generalization gap."""

from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.results import Results
from saltflat.studies.row import Row
from saltflat.studies.store import Verification, pack_rows, verify
from saltflat.studies.study import Study

__all__ = ["Examples", "Recipe", "Results", "Row", "Study", "Verification", "pack_rows", "verify"]
