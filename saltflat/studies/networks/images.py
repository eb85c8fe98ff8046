"""What a network for images is given."""

from __future__ import annotations

from saltflat.errors import ModelError


def check_image_shape(shape: tuple[int, ...], name: str, least: int = 1) -> tuple[int, int, int]:
    """Channels, height and width, if that is what the shape is."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ModelError(
            f"Got inputs of the shape {tuple(shape)} for the network {name!r}. "
            f"Want images (channels, height, width) of at least {least} x {least} pixels. "
            "Do: choose another network, such as 'mlp', or reshape the inputs."
        )
    channels, height, width = shape
    return channels, height, width
