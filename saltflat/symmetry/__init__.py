"""The rescalings of a network that leave its function alone."""

from saltflat.symmetry.canonical import canonical, same_up_to_rescaling

__all__ = ["canonical", "same_up_to_rescaling"]
