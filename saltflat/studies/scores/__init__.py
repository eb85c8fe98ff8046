"""Score how well measures predict the generalization gap, in several ways, since each one alone can be fooled."""

from saltflat.studies.scores.correlation import kendall_a, kendall_b, pearson, spearman
from saltflat.studies.scores.granulated import GranulatedKendall, granulated_kendall
from saltflat.studies.scores.information import ConditionalInformation, conditional_information, pgdl
from saltflat.studies.scores.results import Score, Scores
from saltflat.studies.scores.robust import SignError, hoeffding_weight, sign_error
from saltflat.studies.scores.scoring import score

__all__ = [
    "ConditionalInformation",
    "GranulatedKendall",
    "Score",
    "Scores",
    "SignError",
    "conditional_information",
    "granulated_kendall",
    "hoeffding_weight",
    "kendall_a",
    "kendall_b",
    "pearson",
    "pgdl",
    "score",
    "sign_error",
    "spearman",
]
