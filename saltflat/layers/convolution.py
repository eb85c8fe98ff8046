"""Convolutions and transposed convolutions: linear layers over patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from saltflat.gradients.base import (
    DenseGradient,
    FactoredGradient,
    apply_to_columns,
    compute_piece_size,
    compute_squared_lengths,
    get_scratch_array,
    sum_groups,
)
from saltflat.gradients.outer import KEPT_CPU, OuterProductGradient
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

    On a CPU they are up to ten times faster with blocks of eight channels. Written out, the gradients should need no
    more memory than the patches.
    """
    channels = module.in_channels // module.groups, module.out_channels // module.groups
    blocks = g.device.type == "cpu" and all(channel % 8 == 0 for channel in channels)
    return blocks and module.weight.shape[0] <= g.shape[-len(module.kernel_size) :].numel()


def compute_kernel_gradients(module: Convolution, x: Tensor, g: Tensor, columns: int = 1) -> Tensor:
    """Return each image's gradient of the weight, ``(images, *weight)``, by a convolution with images as groups.

    With several columns, these are beside the output channels, in the gradients and in the result.
    """
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        x, padding = pad_input(module, x).movedim(-1, 1), [0] * len(module.kernel_size)
    else:
        padding = [int(size) for size in module.padding]
    images, weight = len(x), module.weight
    rows = columns * weight.shape[0]
    nothing = weight.new_empty(1).expand(images * rows, *weight.shape[1:])  # only its shape is read
    options = list(module.stride), padding, list(module.dilation), False, [0] * len(padding), images * module.groups
    gradients: Tensor = torch.ops.aten.convolution_backward(
        g.reshape(1, -1, *g.shape[2:]), x.reshape(1, -1, *x.shape[2:]), nothing, None, *options, [False, True, False]
    )[1]
    each: Tensor = gradients.unflatten(0, (images, -1))
    return each


POSITIONS, KERNEL = 100, 9  # smallest numbers of positions and of weights per channel for kernels of many columns


def is_kernel_faster_for_columns(module: Convolution, g: Tensor) -> bool:
    """Return whether torch's own kernels compute many columns of gradients faster than a product of patches.

    With the columns as further output channels, the kernels of float32 on a CPU take half to three quarters of the
    time, except for few positions and 1x1 kernels, whose patches cost nothing.
    """
    return (
        len(module.kernel_size) == 2
        and g.device.type == "cpu"
        and g.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and module.groups == 1
        and module.weight.shape[2:].numel() >= KERNEL
        and g.shape[-2:].numel() >= POSITIONS
    )


def extract_factors(module: Convolution, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return output gradients and patches, as :class:`OuterProductGradient` takes them."""
    dims = len(module.kernel_size)
    columns, examples, groups = *g.shape[:2], module.groups
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
    return left, right


class ConvolutionGradient(OuterProductGradient):
    """Gradients of a convolution for many columns, whose products torch's own kernels compute without patches.

    The factors are made when something else is computed of them.

    Args:
        module: the convolution, of one group.
        x: ``(examples, 1, channels, *space)``.
        g: ``(columns, examples, 1, channels, *space)``.
    """

    def __init__(self, module: Convolution, x: Tensor, g: Tensor) -> None:
        self.module, self.x, self.g = module, x, g
        self.shape, dims = module.weight.shape, len(module.kernel_size)
        self.inner, self.order = (*module.kernel_size, module.in_channels), (0, 1, dims + 2, *range(2, dims + 2))
        self.columns, self.examples = g.shape[:2]
        self.groups, self.positions = 1, g.shape[-dims:].numel()
        self.rows, self.entries = module.out_channels, module.weight[0].numel()

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        return extract_factors(self.module, self.x, self.g)

    @property
    def left(self) -> Tensor:  # type: ignore[override]
        return self._factors[0]

    @property
    def right(self) -> Tensor:  # type: ignore[override]
        return self._factors[1]

    @property
    def device(self) -> torch.device:
        return self.g.device

    def select_examples(self, examples: slice) -> ConvolutionGradient:
        return ConvolutionGradient(self.module, self.x[examples], self.g[:, examples])

    def select_columns(self, columns: slice) -> OuterProductGradient:
        if "_factors" in vars(self):
            return super().select_columns(columns)
        return ConvolutionGradient(self.module, self.x, self.g[columns])

    def count_bytes(self) -> tuple[int, int]:
        size = self.positions * max(self.rows, self.entries) * self.g.element_size()
        return size, size

    @cached_property
    def _written(self) -> Tensor | None:
        """The result of :meth:`_run_kernel` for all examples, if it is small; several statistics use it."""
        size = self.examples * self.columns * self.rows * self.entries
        return None if size > KEPT_CPU else self._run_kernel(slice(None))

    @cached_property
    def _product(self) -> Tensor | None:
        return None if self._written is None else self._move_channels(self._written)

    def _run_kernel(self, examples: slice) -> Tensor:
        """Return the gradients of some examples, ``(examples, columns, rows, channels, *kernel)``."""
        g, x = self.g[:, examples, 0].transpose(0, 1), self.x[examples, 0]
        # A convolution with images as groups, and the columns beside the output channels.
        found = compute_kernel_gradients(self.module, x, g.flatten(1, 2), self.columns)
        per_column: Tensor = found.unflatten(1, (self.columns, self.rows))
        return per_column

    def _move_channels(self, written: Tensor) -> Tensor:
        """Return the result of :meth:`_run_kernel` with the entries in the order of patches."""
        return written.movedim(3, -1).flatten(3).unsqueeze(1)

    def _iterate_written(self) -> Iterator[Tensor]:
        """Yield the results of :meth:`_run_kernel` for some examples at a time."""
        if self._written is not None:
            yield self._written
            return
        step = compute_piece_size(self.columns * self.rows * self.entries, self.device)
        for start in range(0, self.examples, step):
            yield self._run_kernel(slice(start, start + step))

    def _iterate_products(self) -> Iterator[Tensor]:
        return map(self._move_channels, self._iterate_written())

    def sum_squares(self) -> Tensor:
        total = None
        for written in self._iterate_written():
            if total is None:
                total = get_scratch_array("squares", written.shape, written).zero_()
            total[: len(written)].addcmul_(written, written)
        assert total is not None
        return total.sum((0, 1))

    def _has_single_right(self) -> bool:
        return True

    def _has_few_positions(self, groups: Sequence[slice]) -> bool:
        return vars(self).get("_written") is None and super()._has_few_positions(groups)

    def compute_squared_norms(self, groups: Sequence[slice]) -> Tensor:
        if self._has_few_positions(groups):
            return super().compute_squared_norms(groups)
        parts = [compute_squared_lengths(written.flatten(2), 2) for written in self._iterate_written()]
        return sum_groups(torch.cat(parts).T, groups)


@layer(nn.Conv1d, nn.Conv2d, nn.Conv3d, forward=convolve)
def factor_convolution(module: Convolution, x: Tensor, g: Tensor) -> dict[str, FactoredGradient]:
    """Factor the gradients of a convolution into outer products of patches and output gradients."""
    dims = len(module.kernel_size)
    columns, examples = g.shape[:2]
    found: dict[str, FactoredGradient] = {}
    if module.bias is not None:
        bias = g.reshape(columns, examples, -1, module.out_channels, g.shape[-dims:].numel()).sum((2, 4))
        found["bias"] = DenseGradient(bias)
    if columns == 1 and is_kernel_faster(module, g):
        each = compute_kernel_gradients(
            module, x.reshape(-1, *x.shape[-dims - 1 :]), g[0].reshape(-1, *g.shape[-dims - 1 :])
        )
        found["weight"] = DenseGradient(each.unflatten(0, (examples, -1)).sum(1).unsqueeze(0))
    elif columns > 1 and x.dim() == dims + 3 and x.shape[1] == 1 and is_kernel_faster_for_columns(module, g):
        found["weight"] = ConvolutionGradient(module, x, g)
    else:
        inner = (*module.kernel_size, module.in_channels // module.groups)
        order = (0, 1, dims + 2, *range(2, dims + 2))
        found["weight"] = OuterProductGradient(*extract_factors(module, x, g), module.weight.shape, inner, order)
    return found


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
