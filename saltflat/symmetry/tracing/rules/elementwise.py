"""Elementwise operations: products, sums, complex numbers, and functions that commute with scaling."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from saltflat.layers import GROUP
from saltflat.symmetry.tracing.scales import ANY, GROUND, TensorScales
from saltflat.symmetry.tracing.trace import OperationCall, replay_on_ids, rule


@rule("complex")
def propagate_complex(call: OperationCall) -> Any:
    """Require equal scales of real and imaginary parts."""
    return call.scales.equate(*map(call.get_scale_ids, call.args[:2]))


@rule("view_as_complex")
def propagate_view_as_complex(call: OperationCall) -> Any:
    """Require equal scales of real and imaginary parts along the last axis."""
    return call.scales.equate_along(call.get_scale_ids(call.args[0]), [-1])


@rule("view_as_real")
def propagate_view_as_real(call: OperationCall) -> Any:
    """Give real and imaginary parts the scale of the complex number."""
    return call.get_scale_ids(call.args[0])[..., None].expand(call.out.shape)


@rule("_conj _conj_physical _neg_view")
def propagate_conjugate(call: OperationCall) -> Any:
    """Keep the scales of conjugated numbers."""
    return call.get_scale_ids(call.args[0])


@rule("_fft_r2c _fft_c2r _fft_c2c")
def propagate_fft(call: OperationCall) -> Any:
    """Require equal scales along the transformed axes, since every result is a sum over them."""
    return call.scales.equate_along(call.get_scale_ids(call.args[0]), call.args[1], keepdim=True).expand(call.out.shape)


@rule("add sub rsub maximum minimum fmax fmin hypot lerp fmod remainder atan2")
def propagate_sum(call: OperationCall) -> Any:
    """Require equal scales of both operands."""
    one, two = call.args[:2]
    found = equate_operands(call, one, two)
    if call.name == "lerp":
        call.pin(call.args[2])
    return call.make_fixed_scales() if call.name == "atan2" else found


def equate_operands(call: OperationCall, one: Tensor | float, two: Tensor | float) -> Tensor:
    """Require both operands to have equal scales; unused parameter entries take those of the other operand."""
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
    """Require equal scales of both operands, or select scales by a constant mask."""
    mask, one, two = call.args[:3]
    if call.is_constant(mask) and call.get_entry_numbers(one) is None and call.get_entry_numbers(two) is None:
        return torch.where(mask.cpu(), call.get_scale_ids(one), call.get_scale_ids(two)).expand(call.out.shape).clone()
    return equate_operands(call, one, two).expand(call.out.shape).clone()


@rule("addcmul addcdiv")
def propagate_addcmul(call: OperationCall) -> Any:
    """Require equal scales of a summand and a product or quotient."""
    start, one, two = call.args[:3]
    product = call.scales.add(call.get_scale_ids(one), call.get_scale_ids(two), 1 if call.name == "addcmul" else -1)
    return call.scales.equate(call.get_scale_ids(start), product)


@rule("masked_scatter index_put _unsafe_index_put")
def propagate_index_put(call: OperationCall) -> Any:
    """Require one scale for all entries, since positions may depend on the input, unless they are constant."""
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
    """Require one scale along an axis, since positions may depend on the input."""
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


@rule("relu abs leaky_relu rrelu_with_noise nan_to_num real positive")
def propagate_relu(call: OperationCall) -> Any:
    """Keep the scales of a positively homogeneous function's operand."""
    return call.get_scale_ids(call.args[0])


@rule("neg")
def propagate_neg(call: OperationCall) -> Any:
    """Keep scales and parameter entries under negation."""
    # Parameter entries stay parameter entries.
    return call.tracker.get_tensor_scales(call.args[0])


@rule("_prelu_kernel prelu")
def propagate_prelu(call: OperationCall) -> Any:
    """Fix the scale of the slope and keep those of the operand."""
    x, slope = call.args[:2]
    # Not an obstacle: the slope is fixed, the unit is not.
    call.scales.pin(call.get_scale_ids(slope))
    return call.get_scale_ids(x)


@rule("clamp clamp_min clamp_max threshold")
def propagate_clamp(call: OperationCall) -> Any:
    """Keep scales if bounds are zero, infinite or of the same scale as the operand; otherwise fix them."""
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
    """Require equal scales of a tensor and the filled value, or select scales by a constant mask."""
    x, mask, value = call.args[:3]
    if call.is_constant(mask):
        return torch.where(mask.cpu(), call.get_scale_ids(value), call.get_scale_ids(x)).expand(call.out.shape).clone()
    return call.scales.equate(call.get_scale_ids(x), call.get_scale_ids(value)).expand(call.out.shape).clone()


@rule("eq ne lt le gt ge")
def propagate_comparison(call: OperationCall) -> Any:
    """Require equal scales of both operands, so that the comparison does not depend on them."""
    call.scales.equate(call.get_scale_ids(call.args[0]), call.get_scale_ids(call.args[1]))
    return call.make_fixed_scales()


@rule(
    """
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__
    sign sgn isnan isinf isfinite signbit any all count_nonzero
    """
)
def propagate_scale_free(call: OperationCall) -> Any:
    """Give fixed scales to results that do not depend on the scales of operands."""
    return call.make_fixed_scales()


@rule("mul multiply")
def propagate_mul(call: OperationCall) -> Any:
    """Add the log scales of both factors."""
    one, two = call.args[:2]
    for value, other in ((one, two), (two, one)):
        if tuple(getattr(value, "shape", ())) == tuple(call.out.shape) and call.is_constant(other):
            marks, factor = call.tracker.get_tensor_scales(value), call.get_scale_ids(other)
            if bool((factor == GROUND).all()):
                return marks
            if marks.entries:
                # A mask replaces some entries by zeros.
                return TensorScales(torch.where(factor == ANY, float(ANY), marks.ids), True, marks.fixed)
    for parameter, other in ((one, two), (two, one)):
        found = _scale_by_parameter(call, parameter, other)
        if found is not None:
            return found
    return call.scales.add(call.get_scale_ids(one), call.get_scale_ids(two))


def _is_nonzero_constant(call: OperationCall, value: Tensor | float) -> bool:
    """Return whether a value is a constant without zeros, which changes no scale."""
    if not call.is_constant(value):
        return False
    return bool((call.get_scale_ids(value) == GROUND).all())


def _scale_by_parameter(call: OperationCall, parameter: Tensor | float, other: Tensor | float) -> Tensor | None:
    """Treat a factor per channel as a weight that leads from the channel to a new one; None if it is not."""
    numbers = call.get_entry_numbers(parameter)
    if numbers is None or call.get_entry_numbers(other) is not None or call.entries.has_used_entries(numbers):
        return None
    ids = call.get_scale_ids(other)
    N, x = numbers.expand(call.out.shape).reshape(-1).long(), ids.expand(call.out.shape).reshape(-1).long()
    different, first = _find_first_places(N)
    # A factor that multiplies several scales is not a weight of one channel.
    if bool((x == ANY).any()) or not torch.equal(x, x[first][torch.searchsorted(different, N)]):
        return None
    new = torch.where(different > 0, call.scales.add_variables(len(different)), float(ANY))
    call.entries.record_use(numbers, [GROUP] * numbers.dim())
    call.entries.assign_scales(different.double(), new, x[first].double())
    return new[torch.searchsorted(different, N)].reshape(call.out.shape)


def _find_first_places(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct numbers, and the position where each first occurs."""
    different, places = numbers.unique(return_inverse=True)
    first = torch.full((len(different),), len(numbers)).scatter_reduce(0, places, torch.arange(len(numbers)), "amin")
    return different, first


@rule("div divide true_divide")
def propagate_div(call: OperationCall) -> Any:
    """Subtract the log scale of the denominator from that of the numerator."""
    one, two = call.args[:2]
    if call.get_argument(2, "rounding_mode") is not None:
        call.pin(one, two)
        return call.make_fixed_scales()
    if _is_nonzero_constant(call, two) and tuple(one.shape) == tuple(call.out.shape):
        return call.tracker.get_tensor_scales(one)
    return call.scales.add(call.get_scale_ids(one), call.get_scale_ids(two), -1)


@rule("sqrt rsqrt reciprocal square pow")
def propagate_pow(call: OperationCall) -> Any:
    """Multiply log scales by the exponent, if it is a constant fraction; otherwise fix them."""
    powers: dict[str, Any] = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": -1, "square": 2}
    power = powers.get(call.name) if call.name != "pow" else call.args[1]
    exact = (
        _convert_to_fraction(power)
        if isinstance(call.args[0], Tensor) and isinstance(power, Fraction | int | float)
        else None
    )
    if not exact:  # everything to the power of 0 is 1
        call.pin(*call.args[:2])
        return call.make_fixed_scales()
    return call.scales.multiply(call.get_scale_ids(call.args[0]), exact)


def _convert_to_fraction(power: Fraction | float) -> Fraction | int | None:
    """Return an exponent as an exact fraction, or None if it is not one."""
    if not math.isfinite(power):
        return None
    found = Fraction(power).limit_denominator(1000)
    if float(found) != float(power):
        return None
    return found.numerator if found.denominator == 1 else found


@rule("_weight_norm_interface _weight_norm")
def propagate_weight_norm(call: OperationCall) -> Any:
    """Give a normalized weight the scale of its length; that of its direction has no effect."""
    v, g = call.args[:2]
    dim = call.get_argument(2, "dim", 0)
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    call.scales.equate_along(call.get_scale_ids(v), axes)
    found = TensorScales(call.get_scale_ids(g).expand(v.shape).clone(), False, [False])
    return found if isinstance(call.out, Tensor) else [found, TensorScales(call.get_scale_ids(g), False, [False])]
