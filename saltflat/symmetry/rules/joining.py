"""Operations on numbers that must have one scale: sums, the larger of two, a choice between two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saltflat.symmetry.scales import ANY
from saltflat.symmetry.watch import OperationCall, replay_on_ids, rule


@rule("add sub rsub maximum minimum fmax fmin hypot lerp fmod remainder atan2")
def propagate_sum(call: OperationCall) -> Any:
    one, two = call.args[:2]
    found = equate_operands(call, one, two)
    if call.name == "lerp":
        call.pin(call.args[2])
    return call.make_fixed_scales() if call.name == "atan2" else found


def equate_operands(call: OperationCall, one: Any, two: Any) -> Tensor:
    """Both of one scale; the entries of a parameter that nothing has used take the other's."""
    for parameter, other in ((two, one), (one, two)):
        numbers = call.get_entry_numbers(parameter)
        if numbers is not None and call.get_entry_numbers(other) is None and not call.entries.has_used_entries(numbers):
            ids = call.get_scale_ids(other)
            if not bool((ids == ANY).any()):
                call.entries.record_addition(numbers, ids)
                call.entries.assign_scales(numbers, ids)
                break
    return call.scales.equate(call.get_scale_ids(one), call.get_scale_ids(two))


@rule("where")
def propagate_where(call: OperationCall) -> Any:
    mask, one, two = call.args[:3]
    if call.is_constant(mask) and call.get_entry_numbers(one) is None and call.get_entry_numbers(two) is None:
        return torch.where(mask.cpu(), call.get_scale_ids(one), call.get_scale_ids(two)).expand(call.out.shape).clone()
    return equate_operands(call, one, two).expand(call.out.shape).clone()


@rule("addcmul addcdiv")
def propagate_addcmul(call: OperationCall) -> Any:
    start, one, two = call.args[:3]
    product = call.scales.add(call.get_scale_ids(one), call.get_scale_ids(two), 1 if call.name == "addcmul" else -1)
    return call.scales.equate(call.get_scale_ids(start), product)


@rule("masked_scatter index_put _unsafe_index_put")
def propagate_index_put(call: OperationCall) -> Any:
    """Where it is written may be elsewhere for another input: all has one scale."""
    tensors = [arg for arg in call.args if isinstance(arg, Tensor) and arg.is_floating_point()]
    if call.name != "masked_scatter":
        indices = [index for index in call.args[1] if index is not None]
        if call.args[2].numel() == 1:
            return call.scales.equate(call.get_scale_ids(call.args[0]), call.get_scale_ids(call.args[2]).reshape(()))
        if all(map(call.is_constant, indices)) and not call.get_argument(3, "accumulate", False):
            return replay_on_ids(call, indices)[0]
    return _equate_all(call, *tensors)


@rule("index_add index_copy index_fill scatter scatter_add scatter_reduce")
def propagate_scatter(call: OperationCall) -> Any:
    """The same along one axis."""
    target, dim, _, source = call.args[:4]
    if call.get_argument(4, "reduce") in ("prod", "multiply"):
        call.pin(target, source)
        return call.make_fixed_scales()
    one, two = call.get_scale_ids(target), call.get_scale_ids(source)
    if two.dim() == 0:
        return call.scales.equate(one, two)
    one, two = (call.scales.equate_along(ids, [dim], keepdim=True) for ids in (one, two))
    if one.shape != two.shape:
        return _equate_all(call, target, source)
    return call.scales.equate(one, two).expand(call.out.shape).clone()


def _equate_all(call: OperationCall, *tensors: Tensor) -> Tensor:
    whole = [call.scales.equate_along(ids, range(ids.dim())) for ids in map(call.get_scale_ids, tensors)]
    return call.scales.equate(*whole).expand(call.out.shape).clone()
