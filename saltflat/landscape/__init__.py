"""Curves and maps of the loss around a network's weights."""

from saltflat.landscape.landscape import compute_landscape
from saltflat.landscape.result import Landscape, plot_together

__all__ = ["Landscape", "compute_landscape", "plot_together"]
