"""Normalization layers: a scale and a shift per channel of a normalized input."""

from __future__ import annotations

import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.gradients.base import DenseGradient, FactoredGradient, get_scratch_array
from saltflat.layers import layer

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
