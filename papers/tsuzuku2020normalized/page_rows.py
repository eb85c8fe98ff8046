"""Rows of Markdown tables, and what stands in them where there are no rows of a study."""

from analysis import BASELINES, CLAIMS, Found
from pages import NOT_TESTED, TOO_FEW

TABLES, LABELS, SHAPES = CLAIMS[:2], CLAIMS[2], CLAIMS[3]
SHAPE_STUDIES = {"depth-width": "after equal epochs", "depth-width-equal-loss": "stopped at one training loss"}
THREE = ("normalized_sharpness", *BASELINES)


def say_untested(found: Found | None) -> str:
    """Return why there is no verdict."""
    return NOT_TESTED if found is None else TOO_FEW
