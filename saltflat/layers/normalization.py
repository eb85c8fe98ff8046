"""Normalization layers: a scale and a shift per channel of a normalized input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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
    """Compute BatchNorm with fixed statistics as one multiplication, whose backward is one multiplication."""
    inverse = (variance + eps).rsqrt()
    scale = inverse * weight if weight is not None else inverse
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    return x * _reshape_along_channels(scale, x) + _reshape_along_channels(shift, x)


def scale_and_shift(module: BatchNorm, x: Tensor) -> Tensor:
    """Compute the forward pass of a BatchNorm layer with its fixed statistics."""
    assert module.running_mean is not None
    assert module.running_var is not None
    statistics = module.running_mean, module.running_var
    return normalize_with_fixed_statistics(x, *statistics, module.weight, module.bias, module.eps)


@layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, forward=scale_and_shift, applies=_has_fixed_statistics)
def factor_batch_norm(module: BatchNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Return the gradients of scale and shift of a BatchNorm layer with fixed statistics."""
    mean, inverse = _get_statistics(module)
    unit = x.flatten(0, 1)  # (images, channels, *space)
    unit = (unit - _reshape_along_channels(mean, unit)) * _reshape_along_channels(inverse, unit)
    space = [2, *range(4, g.dim())]
    # Computed in an array with the gradient's memory order, along which the sums are fastest.
    strides = g.stride()
    order = sorted(range(g.dim()), key=lambda axis: (-strides[axis], axis))
    product = get_scratch_array("product", [g.shape[axis] for axis in order], g).permute(
        [order.index(axis) for axis in range(g.dim())]
    )
    torch.mul(g, unit.unflatten(0, x.shape[:2]), out=product)
    return {"weight": DenseGradient(product.sum(space)), "bias": DenseGradient(g.sum(space))}


@torch.fx.wrap  # traced as one step: a tracer does not know the number of axes
def reshape_along_channels(vector: Tensor, x: Tensor) -> Tensor:
    """Reshape a vector so that it broadcasts along axis 1 of the input."""
    return vector.reshape(-1, *[1] * (x.dim() - 2))


class Affine(nn.Module):
    """Multiplies every channel by a number and adds another. Channels are at axis 1.

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
        """Return the scaled and shifted input, in its own precision."""
        # As with BatchNorm, half precision stays half precision if the parameters are in float32.
        return (x * reshape_along_channels(self.weight, x) + reshape_along_channels(self.bias, x)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the number of channels."""
        return str(self.weight.numel())


@layer(Affine)
def factor_affine(module: Affine, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Return the gradients of scale and shift of an affine layer."""
    space = [2, *range(4, g.dim())]
    return {"weight": DenseGradient((g * x).sum(space)), "bias": DenseGradient(g.sum(space))}


def normalize_groups(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """Compute GroupNorm by elementary operations: torch's own kernel cannot propagate several columns at once."""
    grouped = x.reshape(x.shape[0], module.num_groups, -1)
    centered = grouped - grouped.mean(2, keepdim=True)
    unit = (centered * (centered.square().mean(2, keepdim=True) + module.eps).rsqrt()).reshape(x.shape)
    if module.weight is None:
        return unit
    along = (-1, *[1] * (x.dim() - 2))
    return unit * module.weight.reshape(along) + module.bias.reshape(along)


@layer(nn.GroupNorm, forward=normalize_groups)
def factor_group_norm(module: nn.GroupNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Return the gradients of scale and shift of a GroupNorm layer."""
    unit = F.group_norm(x.flatten(0, 1), module.num_groups, eps=module.eps).unflatten(0, x.shape[:2])
    space = [2, *range(4, g.dim())]
    return {"weight": DenseGradient((g * unit).sum(space)), "bias": DenseGradient(g.sum(space))}


def _sum_positions(values: Tensor, leading: int, shape: tuple[int, ...]) -> Tensor:
    """Sum over positions, the axes between the leading and the normalized ones."""
    return values.reshape(*values.shape[:leading], -1, *shape).sum(leading)


@layer(nn.LayerNorm)
def factor_layer_norm(module: nn.LayerNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Return the gradients of scale and shift of a LayerNorm layer."""
    unit = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    shape = tuple(module.normalized_shape)
    return {
        "weight": DenseGradient(_sum_positions(g * unit, 2, shape)),
        "bias": DenseGradient(_sum_positions(g, 2, shape)),
    }


@layer(nn.RMSNorm)
def factor_rms_norm(module: nn.RMSNorm, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Return the gradients of the scale of an RMSNorm layer."""
    shape = tuple(module.normalized_shape)
    unit = F.rms_norm(x, list(shape), eps=module.eps)
    return {"weight": DenseGradient(_sum_positions(g * unit, 2, shape))}


def _normalize_instances(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize each channel of each example of ``(examples, channels, *space)``."""
    along = [1] * (x.dim() - 2)
    variance, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0, keepdim=True)
    y = (x - mean) * (variance + eps).rsqrt()
    y = y if weight is None else y * weight.reshape(-1, *along)
    return y if bias is None else y + bias.reshape(-1, *along)


# The parameters of each function, in order. F.instance_norm uses the statistics of the input by default.
_INPUTS = ("input", "weight", "bias", "running_mean", "running_var")
_BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: (*_INPUTS, "training", "momentum", "eps"),
    torch.instance_norm: (*_INPUTS, "use_input_stats", "momentum", "eps"),
    F.batch_norm: tuple(signature(F.batch_norm).parameters),
    F.instance_norm: tuple(signature(F.instance_norm).parameters),
}


class NormalizationRewriter(TorchFunctionMode):
    """Computes BatchNorm with fixed statistics, and InstanceNorm, by elementary operations wherever they are called.

    If the input of GroupNorm has channels last and needs no gradient, it is copied to the usual layout: on a CPU
    torch's backward pass of the other arguments crashes the process.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BATCH_NORMS:
            given = dict(zip(_BATCH_NORMS[func], args, strict=False)) | kwargs
            x, mean, variance = given["input"], given.get("running_mean"), given.get("running_var")
            weight, bias = given.get("weight"), given.get("bias")
            of_batch = given.get("training", False) or given.get("use_input_stats", func is F.instance_norm)
            if func in (torch.instance_norm, F.instance_norm) and of_batch and mean is None and variance is None:
                return _normalize_instances(x, weight, bias, given.get("eps", 1e-5))
            same = all(each is None or each.dtype == x.dtype for each in (mean, variance, weight, bias))
            if mean is not None and variance is not None and not of_batch and same:
                return normalize_with_fixed_statistics(x, mean, variance, weight, bias, given.get("eps", 1e-5))
        elif func in (torch.group_norm, F.group_norm) and args and not args[0].requires_grad:
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        return func(*args, **kwargs)
