"""The extreme eigenvalues of the curvature of the loss, and the density of all eigenvalues."""

from saltflat.spectrum.compute import compute_spectrum
from saltflat.spectrum.result import Block, Density, Eigenvalue, Spectrum

__all__ = ["Block", "Density", "Eigenvalue", "Spectrum", "compute_spectrum"]
