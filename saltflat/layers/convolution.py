"""Convolutions and transposed convolutions: linear layers over patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from saltflat.gradients.base import DenseGradient, FactoredGradient, apply_to_columns
from saltflat.gradients.outer import OuterProductGradient
from saltflat.layers import layer

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def extract_patches(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Return ``(images, *space, channels)`` as a view ``(images, *positions, *kernel, channels)``.

    Channels stay last, so that copying the view moves whole runs of memory.
    """
    space = x.shape[1:-1]
    positions = [
        (size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(space, kernel, stride, dilation, strict=True)
    ]
    steps = x.stride()[1:-1]
    return x.as_strided(
        (x.shape[0], *positions, *kernel, x.shape[-1]),
        (
            x.stride(0),
            *(step * s for step, s in zip(steps, stride, strict=True)),
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            x.stride(-1),
        ),
    )


def pad_input(module: Convolution, x: Tensor) -> Tensor:
    """Return the padded input, with channels last and contiguous."""
    padding = module._reversed_padding_repeated_twice
    if any(padding) and module.padding_mode != "zeros":
        x = F.pad(x, padding, mode=module.padding_mode)
    x = x.movedim(1, -1)
    if any(padding) and module.padding_mode == "zeros":
        x = F.pad(x, [0, 0, *padding])
    return x.contiguous()


class _ConvolutionContext(FunctionCtx):
    weight: Tensor
    shape: torch.Size
    options: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]


class Convolve(torch.autograd.Function):
    """A convolution with a constant weight. The backward pass folds the columns into the batch without a copy."""

    @staticmethod
    def forward(
        ctx: _ConvolutionContext, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        ctx.weight, ctx.shape, ctx.options = weight, x.shape, options
        stride, padding, dilation, groups = options
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: _ConvolutionContext, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = apply_to_columns(lambda g: compute_input_gradients(g, ctx.weight, ctx.shape, ctx.options), g)
        return gradient, None, None, None


def compute_input_gradients(g: Tensor, weight: Tensor, shape: torch.Size, options: tuple[Any, ...]) -> Tensor:
    """Return the gradients at the input, ``(columns, *shape)``, from those at the output."""
    stride, padding, dilation, groups = options
    folded = match_memory_format(g.flatten(0, 1), weight)
    nothing = g.new_empty(1).expand(len(folded), *shape[1:])  # only its shape is read
    mask, zeros = [True, False, False], [0] * len(stride)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        folded, nothing, weight, None, stride, padding, dilation, False, zeros, groups, mask
    )[0]
    per_column: Tensor = gradient.unflatten(0, g.shape[:2])
    return per_column


def match_memory_format(x: Tensor, model: Tensor) -> Tensor:
    """Return images in the memory format of other images, so that the kernels need not convert them at every call."""
    if x.dim() == 4 and model.is_contiguous(memory_format=torch.channels_last):
        return x.contiguous(memory_format=torch.channels_last)
    return x


def convolve(module: Convolution, x: Tensor) -> Tensor:
    """Compute the forward pass of a convolution by :class:`Convolve`."""
    if x.dim() == len(module.kernel_size) + 1:
        return convolve(module, x.unsqueeze(0)).squeeze(0)
    padding: Any = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(module.kernel_size)
    options = (list(module.stride), list(padding), list(module.dilation), module.groups)
    result: Tensor = Convolve.apply(x, match_memory_format(module.weight, x), module.bias, options)  # type: ignore[no-untyped-call]
    return result


def is_kernel_faster(module: Convolution, g: Tensor) -> bool:
    """Return whether torch's own kernels compute single gradients faster than a product of patches.

    On a CPU they are up to ten times faster with blocks of eight channels; for many columns one product is faster.
    Written out, the gradients should need no more memory than the patches.
    """
    channels = module.in_channels // module.groups, module.out_channels // module.groups
    blocks = g.device.type == "cpu" and all(channel % 8 == 0 for channel in channels)
    return blocks and module.weight.shape[0] <= g.shape[-len(module.kernel_size) :].numel()


def compute_kernel_gradients(module: Convolution, x: Tensor, g: Tensor) -> Tensor:
    """Return each image's gradient of the weight, ``(images, *weight)``, by a convolution with images as groups."""
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        x, padding = pad_input(module, x).movedim(-1, 1), [0] * len(module.kernel_size)
    else:
        padding = [int(size) for size in module.padding]
    images, weight = len(x), module.weight
    nothing = weight.new_empty(1).expand(images * weight.shape[0], *weight.shape[1:])  # only its shape is read
    options = list(module.stride), padding, list(module.dilation), False, [0] * len(padding), images * module.groups
    gradients: Tensor = torch.ops.aten.convolution_backward(
        g.reshape(1, -1, *g.shape[2:]), x.reshape(1, -1, *x.shape[2:]), nothing, None, *options, [False, True, False]
    )[1]
    each: Tensor = gradients.unflatten(0, (images, -1))
    return each


@layer(nn.Conv1d, nn.Conv2d, nn.Conv3d, forward=convolve)
def factor_convolution(module: Convolution, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Factor the gradients of a convolution into outer products of patches and output gradients."""
    dims = len(module.kernel_size)
    columns, examples, groups = *g.shape[:2], module.groups
    if columns == 1 and is_kernel_faster(module, g):
        each = compute_kernel_gradients(
            module, x.reshape(-1, *x.shape[-dims - 1 :]), g[0].reshape(-1, *g.shape[-dims - 1 :])
        )
        return {
            "weight": DenseGradient(each.unflatten(0, (examples, -1)).sum(1).unsqueeze(0)),
            "bias": DenseGradient(g.reshape(1, examples, -1, module.out_channels, g.shape[-dims:].numel()).sum((2, 4))),
        }
    x = pad_input(module, x.reshape(-1, *x.shape[-dims - 1 :]))
    view = extract_patches(x, module.kernel_size, module.stride, module.dilation)
    inputs = module.in_channels // groups
    entries = inputs * module.weight.shape[2:].numel()

    view = view.unflatten(-1, (groups, inputs)).movedim(-2, 1)  # (images, groups, *positions, *kernel, inputs)
    view = view.reshape(examples, -1, groups, view.shape[2 : 2 + dims].numel(), entries)
    right = view.transpose(1, 2).reshape(1, examples, groups, -1, entries)

    # Channels last before anything is copied: that is the gradient's memory order on a CPU.
    g = g.movedim(-dims - 1, -1)
    g = g.reshape(columns, examples, -1, view.shape[3], groups, module.out_channels // groups)
    left = g.permute(0, 1, 4, 2, 3, 5).reshape(columns, examples, groups, -1, module.out_channels // groups)
    inner = (*module.kernel_size, inputs)
    order = (0, 1, dims + 2, *range(2, dims + 2))
    weight = OuterProductGradient(left, right, module.weight.shape, inner, order)
    return {"weight": weight, "bias": DenseGradient(left.sum(3).flatten(2))}


Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def factor_transposed_convolution(module: Transposed, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Factor the gradients of a transposed convolution into outer products of inputs and patches of the gradients."""
    dims = len(module.kernel_size)
    columns, examples, groups = *g.shape[:2], module.groups
    rows, outputs = module.in_channels // groups, module.out_channels // groups
    space = x.shape[-dims:]
    x = x.reshape(examples, -1, groups, rows, space.numel())
    left = x.permute(0, 2, 1, 4, 3).reshape(1, examples, groups, -1, rows)

    # Input position t contributes to the outputs t * stride + k * dilation - padding: the patches of the gradient, cut
    # to the input's size.
    flat = g.reshape(-1, *g.shape[-dims - 1 :]).movedim(1, -1)
    sizes: Any = module.padding  # numbers: only ordinary convolutions accept a string
    padding = [p for size in reversed(sizes) for p in (int(size), int(size))]
    flat = F.pad(flat, [0, 0, *padding]).contiguous()
    view = extract_patches(flat, module.kernel_size, module.stride, module.dilation)
    for axis, size in enumerate(space, start=1):
        view = view.narrow(axis, 0, size)
    entries = outputs * module.weight.shape[2:].numel()
    positions = view.shape[1 : 1 + dims].numel()
    view = view.unflatten(-1, (groups, outputs)).movedim(-2, 1)
    view = view.reshape(columns, examples, -1, groups, positions, entries)
    right = view.transpose(2, 3).reshape(columns, examples, groups, -1, entries)

    inner = (*module.kernel_size, outputs)
    order = (0, 1, dims + 2, *range(2, dims + 2))
    bias = g.reshape(columns, examples, -1, module.out_channels, g.shape[-dims:].numel()).sum((2, 4))
    return {"weight": OuterProductGradient(left, right, module.weight.shape, inner, order), "bias": DenseGradient(bias)}
