"""A factor and a shift per channel: what is left of a BatchNorm once its statistics are fixed."""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor, nn

from saltflat.forms import DenseGradient, FactoredGradient
from saltflat.layers import layer


@torch.fx.wrap  # traced as one step: how many axes there are is not known to a tracer
def reshape_along_channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (x.dim() - 2))


class Affine(nn.Module):
    """Multiplies every channel by a number and adds another to it.

    Channels are at axis 1, whatever follows it.

    Example:
        >>> affine = Affine(2)
        >>> affine.weight.data = torch.tensor([1.0, 10.0])
        >>> affine(torch.ones(1, 2)).tolist()
        [[1.0, 10.0]]
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        # Half precision between parameters in float32 stays half precision, as BatchNorm leaves it.
        return (x * reshape_along_channels(self.weight, x) + reshape_along_channels(self.bias, x)).to(x.dtype)

    def extra_repr(self) -> str:
        return str(self.weight.numel())


@layer(Affine)
def factor_affine(module: Affine, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    space = [2, *range(4, g.dim())]
    return {"weight": DenseGradient((g * x).sum(space)), "bias": DenseGradient(g.sum(space))}
