"""LayerNorm and RMSNorm: the affine part multiplies a normalised input."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.forms import Dense, Form
from saltflat.layers import layer


def _summed(values: Tensor, leading: int, shape: tuple[int, ...]) -> Tensor:
    """Sum over positions: everything between the leading axes and the normalised ones."""
    return values.reshape(*values.shape[:leading], -1, *shape).sum(leading)


@layer(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, x: Tensor, g: Tensor) -> dict[str, Form]:
    unit = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    shape = tuple(module.normalized_shape)
    return {"weight": Dense(_summed(g * unit, 2, shape)), "bias": Dense(_summed(g, 2, shape))}


@layer(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm, x: Tensor, g: Tensor) -> dict[str, Form]:
    shape = tuple(module.normalized_shape)
    unit = F.rms_norm(x, list(shape), eps=module.eps)
    return {"weight": Dense(_summed(g * unit, 2, shape))}
