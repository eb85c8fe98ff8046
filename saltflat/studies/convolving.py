"""Convolutions of many networks at once, each with its own weights and images.

Two ways give the same numbers and differ in time and memory:

* ``"grouped"``: one convolution with the networks as groups, which is what ``torch.func.vmap`` makes of it;
* ``"each"``: the networks' convolutions one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.errors import unknown

WAYS = ("auto", "grouped", "each")


@dataclass(frozen=True)
class Form:
    """What a convolution is besides its numbers."""

    stride: tuple[int, int]
    padding: tuple[int, int]


def use_way(model: nn.Module, way: str, device: torch.device) -> None:
    """Make the convolutions of a model go this way under ``vmap``; the model is of no other use afterwards.

    Convolutions with groups, dilation or padding other than zeros stay as ``vmap`` has them.
    """
    if way not in WAYS:
        raise unknown("way of convolving", way, WAYS)
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
            # vmap has no rule for what torch does here when channels are last in memory.
            module.forward = _mean  # type: ignore[method-assign, assignment]
        if type(module) is nn.Conv2d and _plain(module):
            chosen = chosen_way(module, device) if way == "auto" else way
            if chosen == "each":
                form = Form(_pair(module.stride), _pair(module.padding))
                module.forward = partial(_forward, module, form)  # type: ignore[method-assign]


def chosen_way(module: nn.Conv2d, device: torch.device) -> str:
    """What ``"auto"`` means for a convolution there.

    On two cores, grouped convolutions of 3 x 3 were as quick as any, and those of 5 x 5 slower than one by one. On an
    H200 grouped ones were never slower: 64 LeNets with batches of 128 took 7.0 ms a step, one by one 23.1.
    """
    if device.type == "cuda":
        return "grouped"
    return "each" if max(_pair(module.kernel_size)) > 3 else "grouped"


def _plain(module: nn.Conv2d) -> bool:
    numeric = not isinstance(module.padding, str)
    return numeric and module.groups == 1 and module.padding_mode == "zeros" and _pair(module.dilation) == (1, 1)


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return first, second


def _forward(module: nn.Conv2d, form: Form, x: Tensor) -> Tensor:
    found: Tensor = _Convolution.apply(x, module.weight, module.bias, form)  # type: ignore[no-untyped-call]
    return found


def _mean(x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


class _Convolution(torch.autograd.Function):
    """Gives ``vmap`` the stacked tensors, and has them convolved by ordinary operations, which autograd follows."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
        return F.conv2d(x, weight, bias, form.stride, form.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("only under vmap, where its own operations are followed")

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> tuple[Tensor, int]:
        of_images, of_weights, of_biases, *_ = in_dims
        weight = weight.movedim(of_weights, 0)
        bias = None if bias is None else bias.movedim(of_biases, 0)
        if of_images is None:
            return _shared(x, weight, bias, form), 0
        return _each(x.movedim(of_images, 0), weight, bias, form), 0


def _shared(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """All networks see the same images: one convolution with the channels of all."""
    flat = None if bias is None else bias.flatten()
    found = F.conv2d(x, weight.flatten(0, 1), flat, form.stride, form.padding)
    return found.reshape(len(x), *weight.shape[:2], *found.shape[2:]).transpose(0, 1)


def _each(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    biases = [None] * len(weight) if bias is None else bias.unbind()
    return torch.stack(
        [
            F.conv2d(images, own, own_bias, form.stride, form.padding)
            for images, own, own_bias in zip(x.unbind(), weight.unbind(), biases, strict=True)
        ]
    )
