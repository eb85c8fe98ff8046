"""BatchNorm in eval mode: a fixed scale and shift per channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saltflat.forms import DenseGradient, FactoredGradient
from saltflat.layers import layer
from saltflat.scratch import get_scratch_array

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def _has_fixed_statistics(module: BatchNorm) -> bool:
    return not module.training and module.running_mean is not None and module.running_var is not None


def _reshape_along_channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (x.dim() - 2))


def _get_statistics(module: BatchNorm) -> tuple[Tensor, Tensor]:
    assert module.running_mean is not None
    assert module.running_var is not None
    return module.running_mean, (module.running_var + module.eps).rsqrt()


def normalize_with_fixed_statistics(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The same numbers as one multiplication, whose backward is one multiplication."""
    inverse = (variance + eps).rsqrt()
    scale = inverse * weight if weight is not None else inverse
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    return x * _reshape_along_channels(scale, x) + _reshape_along_channels(shift, x)


def scale_and_shift(module: BatchNorm, x: Tensor) -> Tensor:
    assert module.running_mean is not None
    assert module.running_var is not None
    statistics = module.running_mean, module.running_var
    return normalize_with_fixed_statistics(x, *statistics, module.weight, module.bias, module.eps)


@layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, forward=scale_and_shift, applies=_has_fixed_statistics)
def factor_batch_norm(module: BatchNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    mean, inverse = _get_statistics(module)
    unit = x.flatten(0, 1)  # (images, channels, *space)
    unit = (unit - _reshape_along_channels(mean, unit)) * _reshape_along_channels(inverse, unit)
    space = [2, *range(4, g.dim())]
    # Written into an array of the gradient's own memory order: the sums run along it.
    strides = g.stride()
    order = sorted(range(g.dim()), key=lambda axis: (-strides[axis], axis))
    product = get_scratch_array("product", [g.shape[axis] for axis in order], g).permute(
        [order.index(axis) for axis in range(g.dim())]
    )
    torch.mul(g, unit.unflatten(0, x.shape[:2]), out=product)
    return {"weight": DenseGradient(product.sum(space)), "bias": DenseGradient(g.sum(space))}
