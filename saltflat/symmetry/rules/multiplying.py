"""Products, quotients and powers: scales add up."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from saltflat.geometry import GROUP
from saltflat.symmetry.marks import TensorScales
from saltflat.symmetry.scales import ANY, GROUND
from saltflat.symmetry.watch import OperationCall, rule


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
