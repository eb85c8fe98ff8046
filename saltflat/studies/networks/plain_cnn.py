"""Six convolutions of 3 x 3 (Jia and Su, 2020, Table 1)."""

from __future__ import annotations

from torch import nn

from saltflat.studies.networks import register_network
from saltflat.studies.networks.images import check_image_shape


@register_network("cnn6", "six 3 x 3 convolutions, 64-64-pool-128-128-pool-192-192 (Jia and Su, 2020)")
def cnn6(shape: tuple[int, ...], classes: int, *, width: int = 64) -> nn.Module:
    """Weights are drawn as He et al. do, biases are zero; ``width`` is that of the first two layers."""
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
