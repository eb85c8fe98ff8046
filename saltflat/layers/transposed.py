"""Transposed convolutions: a convolution with the parts of input and output gradient exchanged."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.forms import DenseGradient, FactoredGradient, OuterProductGradient
from saltflat.layers import layer
from saltflat.layers.convolution import extract_patches

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def factor_transposed_convolution(module: Transposed, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    dims = len(module.kernel_size)
    columns, examples, groups = *g.shape[:2], module.groups
    rows, outputs = module.in_channels // groups, module.out_channels // groups
    space = x.shape[-dims:]
    x = x.reshape(examples, -1, groups, rows, space.numel())
    left = x.permute(0, 2, 1, 4, 3).reshape(1, examples, groups, -1, rows)

    # Input position t met the outputs t * stride + k * dilation - padding: the patches of the gradient,
    # cut to the input's size.
    flat = g.reshape(-1, *g.shape[-dims - 1 :]).movedim(1, -1)
    sizes: Any = module.padding  # numbers: only ordinary convolutions take a word
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
