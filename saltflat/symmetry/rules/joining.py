"""Operations on numbers that must have one scale: sums, the larger of two, a choice between two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saltflat.symmetry.scales import ANY
from saltflat.symmetry.watch import Call, mirrored, rule


@rule("add sub rsub maximum minimum fmax fmin hypot lerp fmod remainder atan2")
def joins(call: Call) -> Any:
    one, two = call.args[:2]
    found = joined(call, one, two)
    if call.name == "lerp":
        call.pin(call.args[2])
    return call.ground() if call.name == "atan2" else found


def joined(call: Call, one: Any, two: Any) -> Tensor:
    """Both of one scale; the entries of a parameter that nothing has used take the other's."""
    for parameter, other in ((two, one), (one, two)):
        numbers = call.raw(parameter)
        if numbers is not None and call.raw(other) is None and not call.entries.used(numbers):
            ids = call.ids(other)
            if not bool((ids == ANY).any()):
                call.entries.note_added(numbers, ids)
                call.entries.claim(numbers, ids)
                break
    return call.scales.join(call.ids(one), call.ids(two))


@rule("where")
def chooses(call: Call) -> Any:
    mask, one, two = call.args[:3]
    if call.fixed(mask) and call.raw(one) is None and call.raw(two) is None:
        return torch.where(mask.cpu(), call.ids(one), call.ids(two)).expand(call.out.shape).clone()
    return joined(call, one, two).expand(call.out.shape).clone()


@rule("addcmul addcdiv")
def adds_product(call: Call) -> Any:
    start, one, two = call.args[:3]
    product = call.scales.plus(call.ids(one), call.ids(two), 1 if call.name == "addcmul" else -1)
    return call.scales.join(call.ids(start), product)


@rule("masked_scatter index_put _unsafe_index_put")
def writes(call: Call) -> Any:
    """Where it is written may be elsewhere for another input: all has one scale."""
    tensors = [arg for arg in call.args if isinstance(arg, Tensor) and arg.is_floating_point()]
    if call.name != "masked_scatter":
        indices = [index for index in call.args[1] if index is not None]
        if call.args[2].numel() == 1:
            return call.scales.join(call.ids(call.args[0]), call.ids(call.args[2]).reshape(()))
        if all(map(call.fixed, indices)) and not call.argument(3, "accumulate", False):
            return mirrored(call, indices)[0]
    return _whole(call, *tensors)


@rule("index_add index_copy index_fill scatter scatter_add scatter_reduce")
def writes_along(call: Call) -> Any:
    """The same along one axis."""
    target, dim, _, source = call.args[:4]
    if call.argument(4, "reduce") in ("prod", "multiply"):
        call.pin(target, source)
        return call.ground()
    one, two = call.ids(target), call.ids(source)
    if two.dim() == 0:
        return call.scales.join(one, two)
    one, two = (call.scales.join_along(ids, [dim], keepdim=True) for ids in (one, two))
    if one.shape != two.shape:
        return _whole(call, target, source)
    return call.scales.join(one, two).expand(call.out.shape).clone()


def _whole(call: Call, *tensors: Tensor) -> Tensor:
    whole = [call.scales.join_along(ids, range(ids.dim())) for ids in map(call.ids, tensors)]
    return call.scales.join(*whole).expand(call.out.shape).clone()
