"""Train toward flat minima in any loop: gradients at shifted weights, and measures as penalties."""

from saltflat.training.asam import ASAM
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.gradient_norm import GradientNormPenalty
from saltflat.training.measure_penalty import Penalty, penalty
from saltflat.training.sam import SAM
from saltflat.training.shift import shift_weights
from saltflat.training.two_pass import TwoPass

__all__ = ["ASAM", "SAM", "FisherPenalty", "GradientNormPenalty", "Penalty", "TwoPass", "penalty", "shift_weights"]
