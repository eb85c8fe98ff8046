"""Residual networks with the normalization before each convolution (He et al., 2016; Zagoruyko and Komodakis, 2016)."""

from __future__ import annotations

from torch import Tensor, nn

from saltflat.studies.networks import register_network
from saltflat.studies.networks.lenets import check_image_shape
from saltflat.studies.training.dropout import Dropout


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, each after BatchNorm and ReLU, with a shortcut.

    If the shape changes, the shortcut is a 1 x 1 convolution of the first ReLU's output.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.relu2 = nn.ReLU()
        self.dropout = Dropout()
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = (
            nn.Conv2d(before, after, 1, stride, bias=False) if stride != 1 or before != after else nn.Identity()
        )
        self.changes_shape = stride != 1 or before != after

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the shortcut and the branch."""
        inner = self.relu1(self.norm1(x))
        beside: Tensor = self.shortcut(inner if self.changes_shape else x)
        branch: Tensor = self.conv2(self.dropout(self.relu2(self.norm2(self.conv1(inner)))))
        return beside + branch


def build_residual_network(
    shape: tuple[int, ...], classes: int, *, name: str, blocks: int, width: int, factor: int
) -> nn.Sequential:
    """Build three stages of ``blocks`` blocks; the second and third halve the side and double the width."""
    channels, *_ = check_image_shape(shape, name, least=4)
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
    before = width
    for stage in range(3):
        after = width * factor * 2**stage
        for block in range(blocks):
            layers.append(ResidualBlock(before, after, stride=2 if stage and not block else 1))
            before = after
    layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


@register_network("resnet20", "ResNet-20, normalization before convolutions")
def resnet20(shape: tuple[int, ...], classes: int, *, width: int = 16) -> nn.Module:
    """Build ResNet-20: three stages of three blocks with 1, 2 and 4 times ``width`` channels."""
    return build_residual_network(shape, classes, name="resnet20", blocks=3, width=width, factor=1)


@register_network("wrn_16_4", "wide ResNet of depth 16, four times as wide")
def wrn_16_4(shape: tuple[int, ...], classes: int, *, width: int = 16, factor: int = 4) -> nn.Module:
    """Build three stages of two blocks; dropout is between the two convolutions of a block."""
    return build_residual_network(shape, classes, name="wrn_16_4", blocks=2, width=width, factor=factor)


@register_network("wrn_28_2", "wide ResNet of depth 28, twice as wide")
def wrn_28_2(shape: tuple[int, ...], classes: int, *, width: int = 16, factor: int = 2) -> nn.Module:
    """Build three stages of four blocks; dropout is between the two convolutions of a block."""
    return build_residual_network(shape, classes, name="wrn_28_2", blocks=4, width=width, factor=factor)
