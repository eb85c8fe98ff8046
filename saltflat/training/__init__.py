"""Training toward flat minima, in any loop: optimizers and penalties that take gradients at shifted weights."""

from saltflat.training.asam import ASAM
from saltflat.training.fisher_penalty import FisherPenalty
from saltflat.training.gradient_norm import GradientNormPenalty
from saltflat.training.penalty import penalty
from saltflat.training.sam import SAM
from saltflat.training.shift import shifted

__all__ = ["ASAM", "SAM", "FisherPenalty", "GradientNormPenalty", "penalty", "shifted"]
