"""Normalizations: what comes out has the scale of the factors behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saltflat.geometry import GROUP
from saltflat.symmetry.rules.contracting import add_bias
from saltflat.symmetry.scales import ANY
from saltflat.symmetry.watch import OperationCall, rule


@rule(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm batch_norm
    _batch_norm_no_update _batch_norm_with_update _batch_norm_impl_index miopen_batch_norm
    """
)
def propagate_batch_norm(call: OperationCall) -> Any:
    """With running statistics, which follow the scale of what they are taken of: mean as it does, variance squared."""
    x, weight, bias, mean, variance = call.args[:5]
    numbers = [float(arg) for arg in call.args[5:] if isinstance(arg, float)]
    eps = numbers[-1]
    ids = call.get_scale_ids(x)
    channels = call.scales.equate_along(ids, [dim for dim in range(ids.dim()) if dim != 1])
    followers = [call.get_entry_numbers(each) for each in (mean, variance)]
    by_batch = call.name == "_native_batch_norm_legit" and isinstance(mean, bool)
    training = any(arg is True for arg in call.args[5:6]) or by_batch
    if training or any(numbers is None for numbers in followers):
        # Statistics of the batch itself follow any scale, but for the small number added to the variance.
        if not training or eps:
            call.pin(x)
    else:
        for numbers_of in followers:
            assert numbers_of is not None
            call.entries.assign_scales(numbers_of, channels)
        assert followers[1] is not None
        call.watch.epsilons[int(followers[1].min())] = eps
    out = assign_affine_scales(call, weight, bias, torch.Size([len(channels)]))
    first, *others = call.out if isinstance(call.out, tuple | list) else [call.out]
    full = out.reshape(-1, *[1] * (first.dim() - 2)).expand(first.shape).clone()
    return [full, *(call.make_fixed_scales(other) if isinstance(other, Tensor) else None for other in others)]


@rule("native_layer_norm layer_norm _fused_rms_norm rms_norm")
def propagate_layer_norm(call: OperationCall) -> Any:
    x, shape, weight = call.args[:3]
    centred = "layer" in call.name
    bias = call.args[3] if centred else None
    eps = call.get_argument(4 if centred else 3, "eps")
    if eps == 0:
        call.scales.equate_along(call.get_scale_ids(x), range(-len(shape), 0))
    else:
        call.pin(x)
    return _expand_to_outputs(call, assign_affine_scales(call, weight, bias, torch.Size(shape)))


@rule("native_group_norm group_norm")
def propagate_group_norm(call: OperationCall) -> Any:
    x, weight, bias = call.args[:3]
    native = call.name == "native_group_norm"
    groups, eps = (call.args[6], call.args[7]) if native else (call.args[1], call.get_argument(4, "eps", 1e-5))
    if not native:
        weight, bias = call.get_argument(2, "weight"), call.get_argument(3, "bias")
    if eps == 0:
        ids = call.get_scale_ids(x)
        grouped = ids.reshape(x.shape[0], groups, -1)
        call.scales.equate_along(grouped, [2])
    else:
        call.pin(x)
    out = assign_affine_scales(call, weight, bias, torch.Size([x.shape[1]]))
    return _expand_to_outputs(call, out.reshape(-1, *[1] * (x.dim() - 2)))


def _expand_to_outputs(call: OperationCall, ids: Tensor) -> Any:
    first, *others = call.out if isinstance(call.out, tuple | list) else [call.out]
    # Beside the result stand means and deviations, which only a backward pass asks for.
    return [ids.expand(first.shape).clone(), *(call.make_fixed_scales(other) for other in others if other is not None)]


def assign_affine_scales(call: OperationCall, weight: Any, bias: Any, shape: torch.Size) -> Tensor:
    """The scales that a factor and a shift give to what has none of its own."""
    if weight is None:
        out = torch.ones(shape, dtype=torch.float64)
    else:
        numbers = call.get_entry_numbers(weight)
        if numbers is None:
            out = call.get_scale_ids(weight)
            out = torch.where(out == ANY, 1.0, out)
        else:
            out = call.scales.add_variables(shape.numel()).reshape(shape)
            call.entries.record_use(numbers, [GROUP] * numbers.dim())
            call.entries.assign_scales(numbers, out)
    return add_bias(call, out, bias)
