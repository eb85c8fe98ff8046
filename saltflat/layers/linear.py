"""Linear: the gradient is the outer product of the output's gradient with the input, summed over positions."""

from __future__ import annotations

from torch import Tensor, nn

from saltflat.forms import DenseGradient, FactoredGradient, OuterProductGradient
from saltflat.layers import layer


@layer(nn.Linear)
def factor_linear(module: nn.Linear, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    x = x.reshape(1, x.shape[0], 1, -1, x.shape[-1])
    g = g.reshape(*g.shape[:2], 1, -1, g.shape[-1])
    bias = g[:, :, 0, 0] if g.shape[3] == 1 else g.sum((2, 3))
    return {"weight": OuterProductGradient(g, x, module.weight.shape), "bias": DenseGradient(bias)}
