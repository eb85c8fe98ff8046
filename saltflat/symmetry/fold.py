"""The same network without BatchNorm: its factors and shifts go into the layers before it."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from saltflat.engine.session import open_session, take_turns
from saltflat.errors import DataError, ModelError
from saltflat.layers.normalization import Affine
from saltflat.symmetry.batch_norm_uses import (
    Norm,
    Transposed,
    get_output_dimensions,
    is_batch_norm,
    observe_uses,
    trace_uses,
)
from saltflat.symmetry.equality import copy_model


@take_turns
def fold(model: nn.Module, example: Any = None) -> nn.Module:
    """The same function without BatchNorm, as a new model.

    A BatchNorm in eval mode is a factor and a shift per channel. Where it is given exactly what one linear layer or
    convolution returns, and nothing else is, they go into that layer's weight and bias, and an ``nn.Identity`` takes
    its place. Everywhere else (after a sum or a concatenation, first in the network, called twice) it becomes an
    :class:`~saltflat.layers.normalization.Affine`. Either way no running statistics are left to absorb the scale of a layer.

    The model itself is left as it is. The copy is of its class and has its train and eval modes, hooks and
    ``requires_grad``: that of a folded weight is the layer's; that of a folded bias is the layer's, or the BatchNorm's
    where the layer had none. What was no parameter before does not require a gradient.

    A BatchNorm stays if it has no running statistics or a forward pass of its own, or if other code of the model reads
    its numbers.

    Args:
        model: any module.
        example: an input like those it will get: a tensor, a tuple of positional inputs or a dict of named ones. It
            shows what the layers are given, and both models are compared on it in float64; other inputs are taken to
            go the same way through the model. Without one, ``torch.fx`` has to trace the forward pass, which not every
            model allows.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.BatchNorm2d(2))
        >>> fold(model)
        Sequential(
          (0): Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1))
          (1): Identity()
          (2): ReLU()
          (3): Affine(2)
        )
    """
    with open_session(model, "eval"):
        folded = copy_model(model)
        norms = [name for name, module in model.named_modules() if is_batch_norm(module)]
        if norms:
            uses = trace_uses(model) if example is None else observe_uses(model, example)
            for name in norms:
                if name not in uses.read:
                    _fold_batch_norm(folded, name, uses.sources.get(name))
            if not uses.kept_by(folded):
                raise ModelError(
                    f"Expected code that only calls them, but got a {type(model).__name__} that does something else "
                    "once its BatchNorm layers are replaced: its code looks at them besides calling them. Try "
                    "changing it, or going on with the model as it is."
                )
    for old, new in zip(model.modules(), folded.modules(), strict=True):
        new.training = old.training
    return folded


class FoldedBatchNorm(nn.Identity):
    """In the place of a BatchNorm that takes inputs of several dimensions: the layer before has it for one of them."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, input: Tensor) -> Tensor:
        return check_dimensions(input, self.dimensions)

    def extra_repr(self) -> str:
        return f"dimensions={self.dimensions}"


@torch.fx.wrap  # one step to a tracer, which does not know the dimensions
def check_dimensions(x: Tensor, dimensions: int) -> Tensor:
    if x.dim() != dimensions:
        raise DataError(
            f"Expected {dimensions}, but got {x.dim()} dimensions where a BatchNorm was folded into the layer "
            "before. The channels are the layer's units only then. Try folding with an input like this one: "
            "fold(model, example)."
        )
    return x


def _fold_batch_norm(model: nn.Module, name: str, source: str | None) -> None:
    """Replace one BatchNorm, by what it does to the layer it follows or else by an ``Affine``."""
    norm: Any = model.get_submodule(name)
    if source is None:
        affine = Affine(norm.num_features)
        weight, shift = _fuse_weights(torch.ones_like(norm.running_mean)[:, None], None, norm, transposed=False)
        affine.weight = nn.Parameter(weight[:, 0], norm.weight is not None and norm.weight.requires_grad)
        affine.bias = nn.Parameter(shift, norm.bias is not None and norm.bias.requires_grad)
        _replace_in_place(norm, affine)
        return
    layer: Any = model.get_submodule(source)
    # A transposed convolution has its groups along the inputs: (groups, inputs, outputs, ...).
    transposed = isinstance(layer, Transposed)
    groups = layer.groups if transposed else 1
    weight = layer.weight.unflatten(0, (groups, -1)).movedim(0, 1).flatten(1, 2)
    weight, bias = _fuse_weights(weight, layer.bias, norm, transposed)
    weight = weight.unflatten(1, (groups, -1)).movedim(1, 0).flatten(0, 1)
    shift = norm.bias if layer.bias is None else layer.bias
    layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
    layer.bias = nn.Parameter(bias, shift is not None and shift.requires_grad)
    strict = isinstance(norm, nn.BatchNorm2d | nn.BatchNorm3d)
    _replace_in_place(norm, nn.Identity() if strict else FoldedBatchNorm(get_output_dimensions(layer)))


def _fuse_weights(weight: Tensor, bias: Tensor | None, norm: Norm, transposed: bool) -> tuple[Tensor, Tensor]:
    """By torch's own formula, which serves linear layers as well; rounded once, at the end."""
    tensors = (weight, bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    w, b, mean, variance, gamma, beta = (None if t is None else t.detach().double() for t in tensors)
    assert w is not None
    assert mean is not None
    assert variance is not None
    merged = fuse_conv_bn_weights(w, b, mean, variance, norm.eps, gamma, beta, transposed)
    return merged[0].detach().to(weight.dtype), merged[1].detach().to(weight.dtype)


def _replace_in_place(old: nn.Module, new: nn.Module) -> None:
    """Make one module another: whatever holds it, by any name or in a plain list, then holds that; hooks stay."""
    vars(old).update({key: value for key, value in vars(new).items() if "hook" not in key and key != "training"})
    old.__class__ = new.__class__
