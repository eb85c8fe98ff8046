"""Fold every BatchNorm into the preceding layer, or replace it by an affine layer."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from saltflat.engine.session import open_session
from saltflat.errors import DataError, ModelError
from saltflat.layers.normalization import Affine
from saltflat.symmetry.batch_norm_uses import (
    BatchNorm,
    Transposed,
    get_output_dimensions,
    is_batch_norm,
    observe_uses,
    trace_uses,
)
from saltflat.symmetry.equality import Example, copy_model
from saltflat.validation import take_turns


@take_turns
def fold(model: nn.Module, example: Example | None = None) -> nn.Module:
    """Return a new model that computes the same function without BatchNorm.

    A BatchNorm in eval mode is a factor and a shift per channel. Where its input is exactly the output of one linear
    layer or convolution, used nowhere else, they are merged into that layer's weight and bias, and an ``nn.Identity``
    replaces the BatchNorm. Everywhere else (after a sum or a concatenation, first in the network, called twice) an
    :class:`~saltflat.layers.normalization.Affine` replaces it. Either way no running statistics remain that could
    absorb the scale of a layer.

    The model itself is not modified. The copy has its class, train and eval modes, hooks and ``requires_grad``: a
    folded weight takes that of the layer; a folded bias that of the layer, or of the BatchNorm if the layer had no
    bias. New parameters require a gradient if those they replace do.

    A BatchNorm is kept if it has no running statistics or a custom forward pass, or if other code of the model reads
    its tensors.

    Args:
        model: any module.
        example: a typical input: a tensor, a tuple of positional inputs or a dict of named ones. The layers are
            observed while the model runs on it, and both models are compared on it in float64; other inputs are
            assumed to take the same path through the model. If None, ``torch.fx`` traces the forward pass, which is
            not possible for every model.

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
            if not uses.is_preserved_by(folded):
                raise ModelError(
                    f"Expected code that only calls its BatchNorm layers, but got a {type(model).__name__} that "
                    "behaves differently once they are replaced. Try removing code that inspects them, or using the "
                    "model without folding."
                )
    for old, new in zip(model.modules(), folded.modules(), strict=True):
        new.training = old.training
    return folded


class FoldedBatchNorm(nn.Identity):
    """Replaces a folded BatchNorm that accepts several input dimensions, and checks that inputs have the folded one."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return check_dimensions(input, self.dimensions)

    def extra_repr(self) -> str:
        """Return the dimensions for ``repr``."""
        return f"dimensions={self.dimensions}"


@torch.fx.wrap  # a single step of the graph, since a tracer does not know the dimensions
def check_dimensions(x: Tensor, dimensions: int) -> Tensor:
    """Return the tensor, or raise an error if it has another number of dimensions."""
    if x.dim() != dimensions:
        raise DataError(
            f"Expected an input of {dimensions} dimensions where a BatchNorm was folded into the preceding layer, but "
            f"got {x.dim()} dimensions. Try folding with an input like this one: fold(model, example)."
        )
    return x


def _fold_batch_norm(model: nn.Module, name: str, source: str | None) -> None:
    """Fold one BatchNorm into the layer ``source``, or replace it by an ``Affine`` if there is none."""
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


def _fuse_weights(weight: Tensor, bias: Tensor | None, norm: BatchNorm, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return weight and bias by torch's formula, which also holds for linear layers; computed in float64."""
    tensors = (weight, bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    w, b, mean, variance, gamma, beta = (None if t is None else t.detach().double() for t in tensors)
    assert w is not None
    assert mean is not None
    assert variance is not None
    merged = fuse_conv_bn_weights(w, b, mean, variance, norm.eps, gamma, beta, transposed)
    return merged[0].detach().to(weight.dtype), merged[1].detach().to(weight.dtype)


def _replace_in_place(old: nn.Module, new: nn.Module) -> None:
    """Turn one module into another in place, so that all references to it see the change; hooks are kept."""
    vars(old).update({key: value for key, value in vars(new).items() if "hook" not in key and key != "training"})
    old.__class__ = new.__class__
