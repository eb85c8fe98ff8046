"""Operations that commute with positive factors, number by number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saltflat.symmetry.watch import OperationCall, rule


@rule("relu abs leaky_relu rrelu_with_noise nan_to_num real positive")
def propagate_relu(call: OperationCall) -> Any:
    return call.get_scale_ids(call.args[0])


@rule("neg")
def propagate_neg(call: OperationCall) -> Any:
    # The entries of a weight stay entries of a weight.
    return call.watch.get_tensor_scales(call.args[0])


@rule("_prelu_kernel prelu")
def propagate_prelu(call: OperationCall) -> Any:
    x, slope = call.args[:2]
    # No obstacle: the slope is fixed, the unit is not.
    call.scales.pin(call.get_scale_ids(slope))
    return call.get_scale_ids(x)


@rule("clamp clamp_min clamp_max threshold")
def propagate_clamp(call: OperationCall) -> Any:
    """Cut at zero or not at all, or at numbers of the same scale."""
    bounds = [bound for bound in (*call.args[1:], *call.kwargs.values()) if bound is not None]
    if any(not isinstance(bound, Tensor) and not _is_scale_free_bound(bound) for bound in bounds):
        call.pin(call.args[0])
        return call.make_fixed_scales()
    return call.scales.equate(
        call.get_scale_ids(call.args[0]), *[call.get_scale_ids(b) for b in bounds if isinstance(b, Tensor)]
    )


def _is_scale_free_bound(bound: float) -> bool:
    return bound == 0 or math.isinf(bound)


@rule("masked_fill")
def propagate_masked_fill(call: OperationCall) -> Any:
    x, mask, value = call.args[:3]
    if call.is_constant(mask):
        return torch.where(mask.cpu(), call.get_scale_ids(value), call.get_scale_ids(x)).expand(call.out.shape).clone()
    return call.scales.equate(call.get_scale_ids(x), call.get_scale_ids(value)).expand(call.out.shape).clone()


@rule("eq ne lt le gt ge")
def propagate_comparison(call: OperationCall) -> Any:
    """Two numbers of one scale, or one with zero: the answer is the same at every scale."""
    call.scales.equate(call.get_scale_ids(call.args[0]), call.get_scale_ids(call.args[1]))
    return call.make_fixed_scales()


@rule(
    """
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__
    sign sgn isnan isinf isfinite signbit any all count_nonzero
    """
)
def propagate_scale_free(call: OperationCall) -> Any:
    """What is the same at every scale, whatever it is of."""
    return call.make_fixed_scales()
