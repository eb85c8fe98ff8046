"""Convolutions of a batch of networks, each with its own weights and images.

Three methods give the same numbers and differ in time and memory:

* ``"grouped"``: one convolution with the networks as groups, which is what ``torch.func.vmap`` makes of it;
* ``"each"``: the networks' convolutions one after the other;
* ``"banded"``: one product of matrices for each network, all networks' at once. What the rows of an image under a
  kernel make of one row of outputs is a matrix, banded since the kernel slides along the row. Most of it is zeros, but
  images are copied only as often as a kernel is high, and large products are what a GPU is quickest at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from saltflat.errors import make_unknown_name_error
from saltflat.studies.training.dropout import Dropout

WAYS = ("auto", "grouped", "each", "banded")
# Layers that accept images with channels last, which saves two copies. Others may not under vmap: BatchNorm on a GPU
# queries the memory layout of its input, which vmap does not know.
EITHER = (nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Linear, Dropout)
NARROW = 10  # kernels beside each other
ALIGNED = 4  # numbers of float32 in 16 bytes


@dataclass(frozen=True)
class ConvolutionOptions:
    """The options of a convolution.

    Attributes:
        stride: down and across.
        padding: above and beside.
        last: whether outputs may be in the channels-last memory format.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    last: bool


Way: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, ConvolutionOptions], Tensor]


def set_convolution_method(model: nn.Module, way: str) -> None:
    """Set the method of a model's convolutions under ``vmap``; afterwards the model works under ``vmap`` only.

    Convolutions with groups, dilation or padding other than zeros keep ``vmap``'s own method, grouped.
    """
    if way not in WAYS:
        raise make_unknown_name_error("method of convolutions", way, WAYS)
    last = type(model) is nn.Sequential and all(type(layer) in EITHER for layer in model)
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
            # vmap has no rule for the operation that torch uses here in the channels-last format.
            module.forward = _average_pixels  # type: ignore[method-assign, assignment]
        if type(module) is nn.Conv2d and _is_plain_convolution(module):
            form = ConvolutionOptions(_to_pair(module.stride), _to_pair(module.padding), last)
            module.forward = partial(_forward_convolution, module, form, way)  # type: ignore[method-assign]


def choose_convolution_method(x: Tensor, weight: Tensor) -> str:
    """Return the method that ``"auto"`` chooses for these images and kernels.

    On two cores, grouped convolutions of 3 x 3 were as fast as any, and those of 5 x 5 slower than one by one. On an
    H200 a step of 64 LeNets with batches of 128 took 6.7 ms grouped, and 3.4 ms by banded matrices. The arithmetic of
    those grows with the width of an image in kernels, so wide images stay grouped.
    """
    if max(weight.shape[-2:]) <= 3:
        return "grouped"
    if not x.is_cuda:
        return "each"
    return "banded" if x.shape[-1] <= NARROW * weight.shape[-1] else "grouped"


def _is_plain_convolution(module: nn.Conv2d) -> bool:
    numeric = not isinstance(module.padding, str)
    return numeric and module.groups == 1 and module.padding_mode == "zeros" and _to_pair(module.dilation) == (1, 1)


def _to_pair(value: Sequence[Any]) -> tuple[int, int]:
    first, second = value
    return first, second


def _forward_convolution(module: nn.Conv2d, form: ConvolutionOptions, way: str, x: Tensor) -> Tensor:
    if x.dim() == 3:  # one image by itself
        return _forward_convolution(module, form, way, x[None])[0]
    found: Tensor = _BatchedConvolution.apply(x, module.weight, module.bias, form, way)  # type: ignore[no-untyped-call]
    return found


def _average_pixels(x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


class _BatchedConvolution(torch.autograd.Function):
    """Convolve the batched tensors under ``vmap`` by ordinary operations, which autograd differentiates."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionOptions, way: str) -> Tensor:
        return F.conv2d(x, weight, bias, form.stride, form.padding)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        raise NotImplementedError("only under vmap, where its own operations are followed")

    @staticmethod
    def vmap(
        info: tuple[Any, ...],
        in_dims: Sequence[Any],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: ConvolutionOptions,
        way: str,
    ) -> tuple[Tensor, int]:
        of_images, of_weights, of_biases, *_ = in_dims
        weight = weight.movedim(of_weights, 0)
        bias = None if bias is None else bias.movedim(of_biases, 0)
        if of_images is None:
            return _convolve_shared_images(x, weight, bias, form), 0
        x = x.movedim(of_images, 0)
        chosen = choose_convolution_method(x, weight) if way == "auto" else way
        return CONVOLUTIONS[chosen](x, weight, bias, form), 0


def _convolve_shared_images(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionOptions) -> Tensor:
    """Convolve images that all networks share: one convolution with the channels of all."""
    flat = None if bias is None else bias.flatten()
    found = F.conv2d(x, weight.flatten(0, 1), flat, form.stride, form.padding)
    return found.reshape(len(x), *weight.shape[:2], *found.shape[2:]).transpose(0, 1)


def _convolve_grouped(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionOptions) -> Tensor:
    networks = len(x)
    flat = None if bias is None else bias.flatten()
    images = x.transpose(0, 1).flatten(1, 2)
    found = F.conv2d(images, weight.flatten(0, 1), flat, form.stride, form.padding, groups=networks)
    return found.reshape(len(found), networks, -1, *found.shape[2:]).transpose(0, 1)


def _convolve_each(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionOptions) -> Tensor:
    biases = [None] * len(weight) if bias is None else bias.unbind()
    return torch.stack(
        [
            F.conv2d(images, own, own_bias, form.stride, form.padding)
            for images, own, own_bias in zip(x.unbind(), weight.unbind(), biases, strict=True)
        ]
    )


def _convolve_banded(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionOptions) -> Tensor:
    networks, batch, channels, _, width = x.shape
    _, outputs, _, high, wide = weight.shape
    (down, across), (above, beside) = form.stride, form.padding
    places = (width + 2 * beside - wide) // across + 1
    # Wider by columns of zeros: products are nearly twice as quick where rows begin at multiples of 16 bytes.
    step = ALIGNED // math.gcd(ALIGNED, channels)
    wider = math.ceil(width / step) * step
    # Channels last, so that all that a kernel sees in its rows is one piece of memory.
    lying = F.pad(x.permute(0, 1, 3, 4, 2), (0, 0, 0, wider - width, above, above)).contiguous()
    windows = lying.unfold(2, high, down)  # (networks, batch, rows of outputs, wider, channels, high)
    rows = windows.shape[2]
    matrix = windows.permute(0, 1, 2, 5, 3, 4).reshape(networks, batch * rows, -1)
    # A kernel's column k falls on column across * place + k - beside of the image; on none where it is in the padding.
    column, place, k = (torch.arange(count, device=x.device) for count in (wider, places, wide))
    falls = (column[:, None] + beside == across * place + k[:, None, None]).to(x.dtype)  # (wide, wider, places)
    band = torch.matmul(weight, falls.flatten(1)).unflatten(-1, (wider, places))
    product = torch.bmm(matrix, band.permute(0, 3, 4, 2, 5, 1).reshape(networks, -1, places * outputs))
    found = product.view(networks, batch, rows, places, outputs)
    if bias is not None:
        found = found + bias[:, None, None, None, :]
    found = found.permute(0, 1, 4, 2, 3)
    return found if form.last else found.contiguous()


CONVOLUTIONS: dict[str, Way] = {"grouped": _convolve_grouped, "each": _convolve_each, "banded": _convolve_banded}
