"""Operations that commute with positive factors, number by number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saltflat.symmetry.watch import Call, rule


@rule("relu abs leaky_relu rrelu_with_noise nan_to_num real positive")
def keeps(call: Call) -> Any:
    return call.ids(call.args[0])


@rule("neg")
def turns(call: Call) -> Any:
    # The entries of a weight stay entries of a weight.
    return call.watch.marks(call.args[0])


@rule("_prelu_kernel prelu")
def slopes(call: Call) -> Any:
    x, slope = call.args[:2]
    # No obstacle: the slope is fixed, the unit is not.
    call.scales.pin(call.ids(slope))
    return call.ids(x)


@rule("clamp clamp_min clamp_max threshold")
def clamps(call: Call) -> Any:
    """Cut at zero or not at all, or at numbers of the same scale."""
    bounds = [bound for bound in (*call.args[1:], *call.kwargs.values()) if bound is not None]
    if any(not isinstance(bound, Tensor) and not _keeps(bound) for bound in bounds):
        call.pin(call.args[0])
        return call.ground()
    return call.scales.join(call.ids(call.args[0]), *[call.ids(b) for b in bounds if isinstance(b, Tensor)])


def _keeps(bound: float) -> bool:
    return bound == 0 or math.isinf(bound)


@rule("masked_fill")
def fills_masked(call: Call) -> Any:
    x, mask, value = call.args[:3]
    if call.fixed(mask):
        return torch.where(mask.cpu(), call.ids(value), call.ids(x)).expand(call.out.shape).clone()
    return call.scales.join(call.ids(x), call.ids(value)).expand(call.out.shape).clone()


@rule("eq ne lt le gt ge")
def compares(call: Call) -> Any:
    """Two numbers of one scale, or one with zero: the answer is the same at every scale."""
    call.scales.join(call.ids(call.args[0]), call.ids(call.args[1]))
    return call.ground()


@rule(
    """
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__
    sign sgn isnan isinf isfinite signbit any all count_nonzero
    """
)
def answers(call: Call) -> Any:
    """What is the same at every scale, whatever it is of."""
    return call.ground()
