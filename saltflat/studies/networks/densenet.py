"""Densely connected networks: every layer sees the outputs of all earlier ones of its block (Huang et al., 2017)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saltflat.errors import OptionError
from saltflat.studies.networks import register_network
from saltflat.studies.networks.lenets import check_image_shape
from saltflat.studies.training.dropout import Dropout

BLOCKS = 3
# Channels of the 1 x 1 convolution of a layer, times the growth.
BOTTLENECK = 4


class DenseLayer(nn.Module):
    """Append ``growth`` channels: a 1 x 1 and a 3 x 3 convolution, each after BatchNorm and ReLU, before dropout."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(before, BOTTLENECK * growth, 1, bias=False)
        self.dropout1 = Dropout()
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)
        self.dropout2 = Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and the new channels."""
        inner = self.dropout1(self.conv1(self.relu1(self.norm1(x))))
        new: Tensor = self.dropout2(self.conv2(self.relu2(self.norm2(inner))))
        return torch.cat([x, new], dim=1)


@register_network("densenet_bc", "DenseNet-BC of three blocks, with bottlenecks and compression")
def densenet_bc(
    shape: tuple[int, ...], classes: int, *, growth: int = 12, depth: int = 100, compression: float = 0.5
) -> nn.Module:
    """Build a DenseNet-BC with He initialization.

    After a convolution with ``2 * growth`` channels, each of three blocks has ``(depth - 4) / 6`` layers, which append
    ``growth`` channels each. Between blocks, a 1 x 1 convolution keeps the share ``compression`` of the channels, and
    pooling halves the side. Dropout follows every convolution but the first.
    """
    channels, *_ = check_image_shape(shape, "densenet_bc", least=4)
    _check_architecture(growth, depth, compression)
    width = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
    for block in range(BLOCKS):
        for _ in range((depth - 4) // (2 * BLOCKS)):
            layers.append(DenseLayer(width, growth))
            width += growth
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        if block < BLOCKS - 1:
            kept = math.floor(width * compression)
            layers += [nn.Conv2d(width, kept, 1, bias=False), Dropout(), nn.AvgPool2d(2)]
            width = kept
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def _check_architecture(growth: int, depth: int, compression: float) -> None:
    step = 2 * BLOCKS
    if depth < 4 + step or (depth - 4) % step:
        nearest = 4 + step * max(1, round((depth - 4) / step))
        raise OptionError(
            f"Expected a depth of 6 n + 4 (10, 16, ..., 100), but got depth={depth} for the network 'densenet_bc'. "
            f"Try depth={nearest}."
        )
    if growth < 1:
        raise OptionError(
            f"Expected a growth of at least 1, but got growth={growth} for the network 'densenet_bc'. Try growth=12."
        )
    if not 0 < compression <= 1 or 2 * growth * compression < 1:
        raise OptionError(
            f"Expected a compression above 0 and at most 1, but got compression={compression} for the network "
            "'densenet_bc'. Try compression=0.5."
        )
