"""Rescalings of the weights of a network that leave its function unchanged."""

from saltflat.symmetry.canonical import canonicalize, equal_up_to_rescaling

__all__ = ["canonicalize", "equal_up_to_rescaling"]
