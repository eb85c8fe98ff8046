"""Linear layers, embeddings and PReLU: outer products, rows of a table, and slopes."""

from __future__ import annotations

from torch import Tensor, nn

from saltflat.gradients.base import DenseGradient, FactoredGradient
from saltflat.gradients.outer import OuterProductGradient
from saltflat.gradients.rows import RowSparseGradient
from saltflat.layers import layer


@layer(nn.Linear)
def factor_linear(module: nn.Linear, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Factor the gradients of a linear layer into outer products of inputs and output gradients."""
    x = x.reshape(1, x.shape[0], 1, -1, x.shape[-1])
    g = g.reshape(*g.shape[:2], 1, -1, g.shape[-1])
    bias = g[:, :, 0, 0] if g.shape[3] == 1 else g.sum((2, 3))
    return {"weight": OuterProductGradient(g, x, module.weight.shape), "bias": DenseGradient(bias)}


@layer(nn.Embedding, applies=lambda module: module.max_norm is None and not module.scale_grad_by_freq)
def factor_embedding(module: nn.Embedding, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Factor the gradients of an embedding into the rows that were read."""
    index = x.reshape(x.shape[0], -1)
    values = g.reshape(*g.shape[:2], index.shape[1], -1)
    if module.padding_idx is not None:
        values = values * (index != module.padding_idx)[None, :, :, None]
    return {"weight": RowSparseGradient(index, values, module.weight.shape)}


@layer(nn.PReLU)
def factor_prelu(module: nn.PReLU, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Return the gradients of the slopes of a PReLU."""
    slope = g * x.clamp(max=0)
    if module.weight.numel() == 1:
        return {"weight": DenseGradient(slope.flatten(2).sum(2, keepdim=True))}
    # Channels are at axis 1 of the module's input, or at axis 0 if it has only one.
    channels = 3 if g.dim() > 3 else 2
    return {"weight": DenseGradient(slope.movedim(channels, 2).flatten(3).sum(3) if g.dim() > 3 else slope)}
