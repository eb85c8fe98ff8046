"""Rows of Markdown tables, and what stands in them where there are no rows of a study."""

from collections.abc import Iterable

from analysis import BASELINES, CLAIMS, Found

NOT_TESTED = "not tested (no rows yet)"
TOO_FEW = "not tested (too few networks)"
TABLES, LABELS, SHAPES = CLAIMS[:2], CLAIMS[2], CLAIMS[3]
SHAPE_STUDIES = {"depth-width": "after equal epochs", "depth-width-equal-loss": "stopped at one training loss"}
THREE = ("normalized_sharpness", *BASELINES)


def say_untested(found: Found | None) -> str:
    """Return why there is no verdict."""
    return NOT_TESTED if found is None else TOO_FEW


def make_row(cells: Iterable[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def make_head(*names: str) -> str:
    """Return the head of a table, two lines."""
    return make_row(names) + "\n" + "| --- " * len(names) + "|"
