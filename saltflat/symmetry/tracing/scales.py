"""The scale of every entry of a tensor, and which entries are known to be zero or constant.

A scale is the logarithm of the factor that rescaling units applies to a number: a linear form of variables. Linear
forms are numbered, and an array holds the number of each entry's form. Operations that only rearrange entries can then
be applied to the array itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

import torch
from torch import Tensor

from saltflat.symmetry.tracing.elimination import Elimination, LinearForm, add_scaled_form

# The scale of 0 and infinity, which no factor changes. It is number 0, so that operations that fill an array with zeros
# produce the right scales.
ANY = 0
# The factor one: inputs, outputs, constants.
GROUND = 1

# Packs two numbers into one integer.
SHIFT = 1 << 31


class ScaleSystem:
    """All linear forms that occur, and the equations between them."""

    def __init__(self) -> None:
        self.system = Elimination()
        self.forms: dict[int, LinearForm] = {ANY: {}, GROUND: {}}
        self.variables = 0
        self._numbers: dict[tuple[tuple[int, Fraction | int], ...], int] = {(): GROUND}
        self._next = count(2)

    def add_variables(self, size: int) -> Tensor:
        """Return the numbers of ``size`` new variables."""
        found = []
        for _ in range(size):
            found.append(self._number_form({self.variables: 1}))
            self.variables += 1
        return torch.tensor(found, dtype=torch.float64)

    def _number_form(self, form: LinearForm) -> int:
        key = tuple(sorted(form.items()))
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = next(self._next)
            self.forms[known] = form
        return known

    def pin(self, ids: Tensor) -> int:
        """Fix these scales to 0 and return how many were free."""
        free = 0
        for number in _collapse_repeated_axes(ids)[0].unique().tolist():
            form = self.system.substitute(self.forms[int(number)])
            free += bool(form)
            self.system.set_to_zero(form)
        return free

    def equate(self, *arrays: Tensor) -> Tensor:
        """Require entries at the same positions (after broadcasting) to have equal scales, and return them."""
        total = arrays[0]
        for other in arrays[1:]:
            total = apply_elementwise(self._equate_pair, total, other)
        return total

    def _equate_pair(self, one: int, two: int) -> int:
        if one == two or two == ANY:
            return one
        if one == ANY:
            return two
        self.system.set_to_zero(add_scaled_form(self.forms[one], self.forms[two], -1))
        return min(one, two)

    def equate_along(self, ids: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """Require all entries along these axes to have equal scales, and return them."""
        dims = [dim % ids.dim() for dim in dims] if ids.dim() else []
        for dim in sorted(dims):
            # Entries along an axis usually have equal scales already.
            first = ids.narrow(dim, 0, 1)
            ids = first if _is_constant_along(ids, dim) else _reduce_along(self._equate_pair, ids, dim)
        if keepdim:
            return ids.contiguous()
        return ids.squeeze(dims).contiguous() if dims else ids

    def add(self, one: Tensor, two: Tensor, factor: Fraction | int = 1) -> Tensor:
        """Return the scales of elementwise products, or of quotients with ``factor=-1``."""

        def add_pair(a: int, b: int) -> int:
            if ANY in (a, b):
                return ANY
            if b == GROUND:
                return a
            resolved = self.system.substitute
            return self._number_form(add_scaled_form(resolved(self.forms[a]), resolved(self.forms[b]), factor))

        return apply_elementwise(add_pair, one, two)

    def multiply(self, ids: Tensor, factor: Fraction | int) -> Tensor:
        """Return the scales of powers with the exponent ``factor``."""
        ground = torch.full((), GROUND, dtype=torch.float64)

        def multiply_id(a: int, _: int) -> int:
            return (
                a if a == ANY else self._number_form(add_scaled_form({}, self.system.substitute(self.forms[a]), factor))
            )

        return apply_elementwise(multiply_id, ids, ground)


def apply_elementwise(function: Callable[[int, int], int], one: Tensor, two: Tensor) -> Tensor:
    """Apply a function elementwise to two arrays, calling it once for each distinct pair."""
    shape = torch.broadcast_shapes(one.shape, two.shape)
    small = _collapse_repeated_axes(one.expand(shape), two.expand(shape))
    keys, places = (small[0].long() * SHIFT + small[1].long()).unique(return_inverse=True)
    found = [function(*divmod(key, SHIFT)) for key in keys.tolist()]
    values = torch.tensor(found, dtype=torch.float64)[places] if found else torch.zeros_like(small[0])
    # A separate contiguous array, since parts of it may be written to.
    return values.expand(shape).clone(memory_format=torch.contiguous_format)


def _collapse_repeated_axes(*arrays: Tensor) -> list[Tensor]:
    """Return the arrays reduced to size 1 along axes on which all of them are constant."""
    shape = arrays[0].shape
    order = [0, *range(len(shape) - 1, 0, -1)] if shape else []
    for dim in order:
        if shape[dim] > 1 and all(_is_constant_along(array, dim) for array in arrays):
            arrays = tuple(array.narrow(dim, 0, 1) for array in arrays)
    return list(arrays)


def _is_constant_along(ids: Tensor, dim: int) -> bool:
    return ids.shape[dim] < 2 or ids.stride(dim) == 0 or bool((ids == ids.narrow(dim, 0, 1)).all())


def _reduce_along(function: Callable[[int, int], int], ids: Tensor, dim: int) -> Tensor:
    """Reduce an axis to size 1 by repeated halving."""
    while ids.shape[dim] > 1:
        half = ids.shape[dim] // 2
        joined = apply_elementwise(function, ids.narrow(dim, 0, half), ids.narrow(dim, half, half))
        rest = ids.narrow(dim, 2 * half, ids.shape[dim] - 2 * half)
        ids = torch.cat([joined, rest], dim) if rest.numel() else joined
    return ids


# The address of tensors without memory: empty ones, and those that are not stored as an array.
NO_STORAGE = 0


@dataclass(frozen=True)
class TensorScales:
    """The scales of a tensor's entries.

    Attributes:
        ids: an array of the tensor's shape with the number of each entry's scale, or of each parameter entry.
        entries: whether ``ids`` holds numbers of parameter entries.
        fixed: a list of one item, whether the tensor depends on constants only; shared with its views.
    """

    ids: Tensor
    entries: bool
    fixed: list[bool]


def make_constant_scales(tensor: Tensor) -> TensorScales:
    """Return the scales of a constant: ``ANY`` for zeros and infinities, ``GROUND`` for all others."""
    if not isinstance(tensor, Tensor):
        return TensorScales(torch.zeros(()), False, [True])
    if _has_no_storage(tensor):
        scale = ANY if tensor._is_zerotensor() else GROUND
        return TensorScales(torch.full(tensor.shape, scale, dtype=torch.float64), False, [True])
    free = ((tensor == 0) | tensor.isinf()).cpu() if tensor.is_floating_point() else (tensor == 0).cpu()
    ids = torch.where(free, float(ANY), float(GROUND)).double()
    return TensorScales(copy_in_memory_order(ids, tensor), False, [True])


def _has_no_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is sparse, or a symbolic zero of forward-mode differentiation."""
    return tensor.layout is not torch.strided or tensor._is_zerotensor()


def copy_in_memory_order(ids: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy in the memory order of the tensor, so that views of both correspond."""
    if _has_no_storage(tensor):
        return ids.clone()
    return torch.empty_like(tensor, dtype=torch.float64, device="cpu").copy_(ids)


def get_storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which it shares with its views; ``NO_STORAGE`` if it has none."""
    return NO_STORAGE if _has_no_storage(tensor) else tensor.untyped_storage().data_ptr()


def has_same_storage(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
