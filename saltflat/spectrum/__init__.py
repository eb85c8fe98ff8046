"""The eigenvalues of the loss's curvature: the outermost ones, and the density of all."""

from saltflat.spectrum.compute import compute_spectrum
from saltflat.spectrum.result import Block, Density, Eigenvalue, Spectrum

__all__ = ["Block", "Density", "Eigenvalue", "Spectrum", "compute_spectrum"]
