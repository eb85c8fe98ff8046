"""Embedding: the gradient at what a position read goes to the row it read."""

from __future__ import annotations

from torch import Tensor, nn

from saltflat.forms import FactoredGradient, RowSparseGradient
from saltflat.layers import layer


@layer(nn.Embedding, applies=lambda module: module.max_norm is None and not module.scale_grad_by_freq)
def factor_embedding(module: nn.Embedding, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    index = x.reshape(x.shape[0], -1)
    values = g.reshape(*g.shape[:2], index.shape[1], -1)
    if module.padding_idx is not None:
        values = values * (index != module.padding_idx)[None, :, :, None]
    return {"weight": RowSparseGradient(index, values, module.weight.shape)}
