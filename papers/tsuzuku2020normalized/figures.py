"""The paper's figures, drawn from the rows."""

from collections.abc import Iterator
from pathlib import Path


def draw_figures(out: Path) -> Iterator[Path]:
    """Draw the figures whose rows are there, and yield their paths."""
    yield from ()
