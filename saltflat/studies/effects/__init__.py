"""Compare the values of each setting of a study: by how much do measures, losses, errors and gaps change?"""

from saltflat.studies.effects.compute import compute_effects
from saltflat.studies.effects.results import AxisEffects, Change, Effects, Estimate, Quantity, ValueEffects

__all__ = ["AxisEffects", "Change", "Effects", "Estimate", "Quantity", "ValueEffects", "compute_effects"]
