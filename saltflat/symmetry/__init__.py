"""The rescalings of a network that leave its function alone."""
