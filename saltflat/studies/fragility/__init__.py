"""Compare rankings: how much of a measure's order of networks survives another seed, setting or measurement?"""

from saltflat.studies.fragility.compute import compute_fragility
from saltflat.studies.fragility.results import Fragility, ShiftSurvival, Survival

__all__ = ["Fragility", "ShiftSurvival", "Survival", "compute_fragility"]
