"""Elementwise operations: products, sums, complex numbers, and functions that commute with scaling."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from saltflat.engine.geometry import GROUP
from saltflat.symmetry.tracing.scales import ANY, GROUND, TensorScales
from saltflat.symmetry.tracing.trace import OperationCall, replay_on_ids, rule


@rule("complex")
def propagate_complex(call: OperationCall) -> Any:
    return call.scales.equate(*map(call.get_scale_ids, call.args[:2]))


@rule("view_as_complex")
def propagate_view_as_complex(call: OperationCall) -> Any:
    return call.scales.equate_along(call.get_scale_ids(call.args[0]), [-1])


@rule("view_as_real")
def propagate_view_as_real(call: OperationCall) -> Any:
    return call.get_scale_ids(call.args[0])[..., None].expand(call.out.shape)


@rule("_conj _conj_physical _neg_view")
def propagate_conjugate(call: OperationCall) -> Any:
    return call.get_scale_ids(call.args[0])


@rule("_fft_r2c _fft_c2r _fft_c2c")
def propagate_fft(call: OperationCall) -> Any:
    """Every number of the result is a sum of all along the axes."""
    return call.scales.equate_along(call.get_scale_ids(call.args[0]), call.args[1], keepdim=True).expand(call.out.shape)


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


@rule("mul multiply")
def propagate_mul(call: OperationCall) -> Any:
    one, two = call.args[:2]
    for value, other in ((one, two), (two, one)):
        if tuple(getattr(value, "shape", ())) == tuple(call.out.shape) and call.is_constant(other):
            marks, factor = call.watch.get_tensor_scales(value), call.get_scale_ids(other)
            if bool((factor == GROUND).all()):
                return marks
            if marks.entries:
                # Under a mask some of the entries are zeros instead.
                return TensorScales(torch.where(factor == ANY, float(ANY), marks.ids), True, marks.fixed)
    for parameter, other in ((one, two), (two, one)):
        found = _scale_by_parameter(call, parameter, other)
        if found is not None:
            return found
    return call.scales.add(call.get_scale_ids(one), call.get_scale_ids(two))


def _is_nonzero_constant(call: OperationCall, value: Any) -> bool:
    """A constant without zeros: it changes no scale, and the entries of a weight stay what they are."""
    if not call.is_constant(value):
        return False
    return bool((call.get_scale_ids(value) == GROUND).all())


def _scale_by_parameter(call: OperationCall, parameter: Any, other: Any) -> Tensor | None:
    """A factor per channel leads from the channel to a new one, as a weight does."""
    numbers = call.get_entry_numbers(parameter)
    if numbers is None or call.get_entry_numbers(other) is not None or call.entries.has_used_entries(numbers):
        return None
    ids = call.get_scale_ids(other)
    N, x = numbers.expand(call.out.shape).reshape(-1).long(), ids.expand(call.out.shape).reshape(-1).long()
    different, first = _find_first_places(N)
    # One factor for several scales belongs to none of them.
    if bool((x == ANY).any()) or not torch.equal(x, x[first][torch.searchsorted(different, N)]):
        return None
    new = torch.where(different > 0, call.scales.add_variables(len(different)), float(ANY))
    call.entries.record_use(numbers, [GROUP] * numbers.dim())
    call.entries.assign_scales(different.double(), new, x[first].double())
    return new[torch.searchsorted(different, N)].reshape(call.out.shape)


def _find_first_places(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The different ones, and where each is first met."""
    different, places = numbers.unique(return_inverse=True)
    first = torch.full((len(different),), len(numbers)).scatter_reduce(0, places, torch.arange(len(numbers)), "amin")
    return different, first


@rule("div divide true_divide")
def propagate_div(call: OperationCall) -> Any:
    one, two = call.args[:2]
    if call.get_argument(2, "rounding_mode") is not None:
        call.pin(one, two)
        return call.make_fixed_scales()
    if _is_nonzero_constant(call, two) and tuple(one.shape) == tuple(call.out.shape):
        return call.watch.get_tensor_scales(one)
    return call.scales.add(call.get_scale_ids(one), call.get_scale_ids(two), -1)


@rule("sqrt rsqrt reciprocal square pow")
def propagate_pow(call: OperationCall) -> Any:
    powers: dict[str, Any] = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": -1, "square": 2}
    power = powers.get(call.name) if call.name != "pow" else call.args[1]
    exact = (
        _convert_to_fraction(power)
        if isinstance(call.args[0], Tensor) and isinstance(power, Fraction | int | float)
        else None
    )
    if not exact:  # to the power of 0 everything is 1
        call.pin(*call.args[:2])
        return call.make_fixed_scales()
    return call.scales.multiply(call.get_scale_ids(call.args[0]), exact)


def _convert_to_fraction(power: Fraction | float) -> Fraction | int | None:
    """A power as a fraction, if it is one."""
    if not math.isfinite(power):
        return None
    found = Fraction(power).limit_denominator(1000)
    if float(found) != float(power):
        return None
    return found.numerator if found.denominator == 1 else found


@rule("_weight_norm_interface _weight_norm")
def propagate_weight_norm(call: OperationCall) -> Any:
    """A length times a direction: the direction's own length plays no part."""
    v, g = call.args[:2]
    dim = call.get_argument(2, "dim", 0)
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    call.scales.equate_along(call.get_scale_ids(v), axes)
    found = TensorScales(call.get_scale_ids(g).expand(v.shape).clone(), False, [False])
    return found if isinstance(call.out, Tensor) else [found, TensorScales(call.get_scale_ids(g), False, [False])]
