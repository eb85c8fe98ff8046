"""PReLU: the slope of the negative part, one for all channels or one each."""

from __future__ import annotations

from torch import Tensor, nn

from saltflat.forms import DenseGradient, FactoredGradient
from saltflat.layers import layer


@layer(nn.PReLU)
def factor_prelu(module: nn.PReLU, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    slope = g * x.clamp(max=0)
    if module.weight.numel() == 1:
        return {"weight": DenseGradient(slope.flatten(2).sum(2, keepdim=True))}
    # Channels are at axis 1 of what the module was given, or axis 0 where that has only one.
    channels = 3 if g.dim() > 3 else 2
    return {"weight": DenseGradient(slope.movedim(channels, 2).flatten(3).sum(3) if g.dim() > 3 else slope)}
