"""Layers whose second derivatives torch gets wrong, written out in steps that it gets right.

A penalty differentiates gradients. As of torch 2.13, ``torch._weight_norm`` has a wrong second derivative. When
examples are vectorised, so have normalisation layers with factors of their own (the statistics of the forward pass are
taken for constants), and ``prelu`` has a wrong first one. Factors that are a step of their own are plain products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class DecomposedLayersMode(TorchFunctionMode):
    """Inside, these layers are taken apart; their values stay what they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return TAKEN_APART.get(func, func)(*args, **(kwargs or {}))


def _decompose_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def _decompose_layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    y = F.layer_norm(input, normalized_shape, None, None, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _decompose_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    y = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    channels = (-1, *(1 for _ in input.shape[2:]))
    y = y if weight is None else y * weight.reshape(channels)
    return y if bias is None else y + bias.reshape(channels)


def _decompose_prelu(input: Tensor, weight: Tensor) -> Tensor:
    per_unit = weight.numel() > 1 and input.dim() > 2
    return input.where(input > 0, input * (weight.reshape(-1, *(1 for _ in input.shape[2:])) if per_unit else weight))


TAKEN_APART: dict[Any, Any] = {
    torch._weight_norm: _decompose_weight_norm,
    torch.prelu: _decompose_prelu,
    F.prelu: _decompose_prelu,
    torch.layer_norm: _decompose_layer_norm,
    F.layer_norm: _decompose_layer_norm,
    F.instance_norm: _decompose_instance_norm,
}
