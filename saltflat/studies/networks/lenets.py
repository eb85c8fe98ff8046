"""LeNets and plain convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from saltflat.errors import ModelError
from saltflat.studies.networks import register_network
from saltflat.studies.training.dropout import Dropout


def check_image_shape(shape: tuple[int, ...], name: str, least: int = 1) -> tuple[int, int, int]:
    """Check that the shape is that of an image, and return its channels, height and width."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ModelError(
            f"Expected images (channels, height, width) of at least {least} x {least} pixels, but got inputs of the "
            f"shape {tuple(shape)} for the network {name!r}. Try choosing another network, such as 'mlp', or "
            "reshaping the inputs."
        )
    channels, height, width = shape
    return channels, height, width


KERNEL = 5
# Two convolutions of 5 x 5 without padding, each halved, leave one pixel of 16; smaller images are padded.
UNPADDED = 16


@register_network("lenet5", "LeNet-5: conv6-pool-conv16-pool-fc120-fc84, 5 x 5, with ReLU")
def lenet5(
    shape: tuple[int, ...], classes: int, *, channels: Sequence[int] = (6, 16), units: Sequence[int] = (120, 84)
) -> nn.Module:
    """Build LeNet-5. Images smaller than 16 x 16 are padded by two pixels before each convolution."""
    depth, height, width = check_image_shape(shape, "lenet5", least=4)
    padding = 0 if min(height, width) >= UNPADDED else 2
    first, second = channels
    layers: list[nn.Module] = [
        nn.Conv2d(depth, first, KERNEL, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, KERNEL, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
    ]  # fmt: skip
    for _ in range(2):
        height, width = ((side + 2 * padding - KERNEL + 1) // 2 for side in (height, width))
    sizes = [second * height * width, *units]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), Dropout()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


@register_network("ibayashi_lenet", "LeNet with a first pooling of stride 1 (Ibayashi et al., 2021)")
def ibayashi_lenet(
    shape: tuple[int, ...], classes: int, *, channels: Sequence[int] = (6, 16, 120), units: int = 84
) -> nn.Module:
    """Build the LeNet of the random-label experiment: on MNIST its linear layers have 5880 inputs."""
    depth, height, width = check_image_shape(shape, "ibayashi_lenet", least=15)
    first, second, third = channels
    # The pooling of stride 1 takes one pixel, each unpadded convolution four, and the second pooling half.
    height, width = ((side - 1 - 4) // 2 - 4 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(depth, first, KERNEL, padding=2), nn.ReLU(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(first, second, KERNEL), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(second, third, KERNEL), nn.ReLU(),
        nn.Flatten(), nn.Linear(third * height * width, units), nn.ReLU(), Dropout(), nn.Linear(units, classes),
    )  # fmt: skip


@register_network("cnn6", "six 3 x 3 convolutions, 64-64-pool-128-128-pool-192-192 (Jia and Su, 2020)")
def cnn6(shape: tuple[int, ...], classes: int, *, width: int = 64) -> nn.Module:
    """Build six convolutions with He initialization and zero biases; ``width`` is that of the first two layers."""
    channels, *_ = check_image_shape(shape, "cnn6", least=4)
    layers: list[nn.Module] = []
    for stage in (1, 2, 3):
        if stage > 1:
            layers.append(nn.MaxPool2d(2))
        for _ in range(2):
            layers += [nn.Conv2d(channels, stage * width, 3, padding=1), nn.ReLU()]
            channels = stage * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model
