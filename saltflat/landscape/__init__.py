"""The loss around a network's weights: curves and maps."""

from saltflat.landscape.plot import plot_together
from saltflat.landscape.result import Landscape
from saltflat.landscape.slice import compute_landscape

__all__ = ["Landscape", "compute_landscape", "plot_together"]
