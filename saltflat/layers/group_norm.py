"""GroupNorm: a scale and shift per channel of an input normalised within its groups."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.forms import DenseGradient, FactoredGradient
from saltflat.layers import layer


def normalize_groups(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """The same by elementary operations: torch's own kernel has no backward for several columns at once."""
    grouped = x.reshape(x.shape[0], module.num_groups, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    unit = (centred * (centred.square().mean(2, keepdim=True) + module.eps).rsqrt()).reshape(x.shape)
    if module.weight is None:
        return unit
    along = (-1, *[1] * (x.dim() - 2))
    return unit * module.weight.reshape(along) + module.bias.reshape(along)


@layer(nn.GroupNorm, forward=normalize_groups)
def factor_group_norm(module: nn.GroupNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    unit = F.group_norm(x.flatten(0, 1), module.num_groups, eps=module.eps).unflatten(0, x.shape[:2])
    space = [2, *range(4, g.dim())]
    return {"weight": DenseGradient((g * unit).sum(space)), "bias": DenseGradient(g.sum(space))}
