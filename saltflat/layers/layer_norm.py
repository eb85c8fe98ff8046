"""LayerNorm and RMSNorm: the affine part multiplies a normalised input."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.forms import DenseGradient, FactoredGradient
from saltflat.layers import layer


def _sum_positions(values: Tensor, leading: int, shape: tuple[int, ...]) -> Tensor:
    """Sum over positions: everything between the leading axes and the normalised ones."""
    return values.reshape(*values.shape[:leading], -1, *shape).sum(leading)


@layer(nn.LayerNorm)
def factor_layer_norm(module: nn.LayerNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    unit = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    shape = tuple(module.normalized_shape)
    return {
        "weight": DenseGradient(_sum_positions(g * unit, 2, shape)),
        "bias": DenseGradient(_sum_positions(g, 2, shape)),
    }


@layer(nn.RMSNorm)
def factor_rms_norm(module: nn.RMSNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    shape = tuple(module.normalized_shape)
    unit = F.rms_norm(x, list(shape), eps=module.eps)
    return {"weight": DenseGradient(_sum_positions(g * unit, 2, shape))}
