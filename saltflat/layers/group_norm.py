"""GroupNorm: a scale and shift per channel of an input normalised within its groups."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.forms import Dense, Form
from saltflat.layers import layer


@layer(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, x: Tensor, g: Tensor) -> dict[str, Form]:
    unit = F.group_norm(x.flatten(0, 1), module.num_groups, eps=module.eps).unflatten(0, x.shape[:2])
    space = [2, *range(4, g.dim())]
    return {"weight": Dense((g * unit).sum(space)), "bias": Dense(g.sum(space))}
