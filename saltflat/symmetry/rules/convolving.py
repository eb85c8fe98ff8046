"""Convolutions: matrix products of the patches of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saltflat.geometry import GROUP, IN, OUT, POSITION
from saltflat.symmetry.marks import TensorScales
from saltflat.symmetry.rules.contracting import add_bias, multiply_by_weight
from saltflat.symmetry.scales import ANY, GROUND
from saltflat.symmetry.watch import OperationCall, rule


@rule("convolution _convolution convolution_overrideable")
def propagate_convolution(call: OperationCall) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = call.args[:9]
    space = weight.dim() - 2
    marks = call.watch.get_tensor_scales(weight)
    kernel = marks.ids.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    kernel = kernel.transpose(1, 2) if transposed else kernel  # (groups, out, in, *kernel)
    if marks.entries:
        call.entries.record_use(kernel, (GROUP, OUT, IN, *[POSITION] * space))
    images = call.get_scale_ids(x)
    images = images if images.dim() == space + 2 else images[None]
    if marks.entries and not _is_uniform(images):
        if transposed:
            # The same as a plain one of an image with zeros between its pixels, with the kernel turned around.
            images = _insert_zeros(images, weight.shape[2:], stride, padding, dilation, extra)
            kernel, stride, padding = kernel.flip(list(range(3, kernel.dim()))), [1], [0]
        found = _convolve_positions(call, images, kernel, stride, padding, dilation)
        # A bias belongs to the last axis.
        return add_bias(call, found, bias).movedim(-1, 1).reshape(call.out.shape)
    channels = call.scales.equate_along(images, [0, *range(2, space + 2)])
    head = add_bias(call, _convolve_channels(call, channels, marks, kernel.flatten(3)), bias)
    return head.reshape(-1, *[1] * space).expand(call.out.shape).clone()


def _is_uniform(images: Tensor) -> bool:
    """Whether every channel has one scale at all its positions."""
    flat = images.transpose(0, 1).flatten(1)
    return bool((flat == flat[:, :1]).all())


def _convolve_channels(call: OperationCall, channels: Tensor, marks: TensorScales, kernel: Tensor) -> Tensor:
    groups = kernel.shape[0]
    tail = torch.where(channels == ANY, float(GROUND), channels).reshape(groups, 1, -1, 1)
    if marks.entries:
        head = call.scales.add_variables(groups * kernel.shape[1])
        call.entries.assign_scales(kernel, head.reshape(groups, -1, 1, 1), tail)
        return head
    products = call.scales.add(kernel, tail.expand(kernel.shape))
    return call.scales.equate_along(products, [2, 3]).reshape(-1)


def _convolve_positions(
    call: OperationCall,
    images: Tensor,
    kernel: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """As a product of each patch with the kernel, for images whose positions differ (a Linear layer may give such)."""
    sizes = kernel.shape[3:]
    patches = F.pad(images, [side for pad in reversed(_expand_option(padding, sizes)) for side in (pad, pad)])
    for axis, (size, step, gap) in enumerate(
        zip(sizes, _expand_option(stride, sizes), _expand_option(dilation, sizes), strict=True), start=2
    ):
        patches = patches.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    # (images, channels, *positions, *kernel) -> (images, *positions, groups, channels and kernel)
    places = patches.shape[2 : 2 + len(sizes)]
    patches = patches.movedim(1, 1 + len(sizes)).reshape(images.shape[0], *places, kernel.shape[0], -1)
    found = [
        multiply_by_weight(call, patches[..., group, :].flatten(0, -2), kernel[group].flatten(1).mT)
        for group in range(kernel.shape[0])
    ]
    return torch.cat(found, 1).reshape(images.shape[0], *places, -1)


def _insert_zeros(
    images: Tensor, sizes: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    extra: Sequence[int],
) -> Tensor:  # fmt: skip
    sides: list[int] = []
    for axis, (size, step, pad, gap, more) in enumerate(
        zip(sizes, *(_expand_option(option, sizes) for option in (stride, padding, dilation, extra)), strict=True),
        start=2,
    ):
        wide = images.new_zeros(*images.shape[:axis], (images.shape[axis] - 1) * step + 1, *images.shape[axis + 1 :])
        wide[(slice(None),) * axis + (slice(None, None, step),)] = images
        images = wide
        around = gap * (size - 1) - pad
        sides = [around, around + more, *sides]
    return F.pad(images, sides)


def _expand_option(option: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return list(option) if len(option) == len(sizes) else list(option) * len(sizes)


@rule("cudnn_convolution cudnn_convolution_transpose")
def propagate_cudnn_convolution(call: OperationCall) -> Any:
    """What a backend calls directly has its arguments in another order."""
    x, weight = call.args[:2]
    call.pin(x, weight, known=False)
    return call.make_fixed_scales()
