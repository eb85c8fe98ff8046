"""The scale of every number in a tensor, and the linear equations between logarithms of scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A linear combination of variables, as nonzero coefficients by variable; an empty one is 0.
LinearForm: TypeAlias = dict[int, Fraction | int]


class Elimination:
    """A system of linear equations, in which some variables are solved in terms of others.

    An equation is solved for its latest variable, so that solved variables depend on earlier ones only. Nearly all
    equations state that two variables are equal; then elimination is a union of sets.

    Example:
        The equations a + b = 0 and b = c leave one variable free.

        >>> system = Elimination()
        >>> a, b, c = 0, 1, 2
        >>> system.set_to_zero({a: 1, b: 1})
        >>> system.set_to_zero({b: 1, c: -1})
        >>> system.substitute({c: 2})
        {0: -2}
    """

    def __init__(self) -> None:
        self._solved: dict[int, LinearForm] = {}

    def substitute(self, form: LinearForm) -> LinearForm:
        """Return the linear form in terms of free variables."""
        if not any(variable in self._solved for variable in form):
            return form
        total: LinearForm = {}
        for variable, coefficient in form.items():
            total = add_scaled_form(total, self._solve_variable(variable), coefficient)
        return total

    def _solve_variable(self, variable: int) -> LinearForm:
        known = self._solved.get(variable)
        if known is None:
            return {variable: 1}
        # Solutions are stored in free variables, so that chains of equalities (one per layer) are followed once.
        waiting = [variable]
        while waiting:
            last = waiting[-1]
            behind = [v for v in self._solved[last] if v in self._solved and self._is_unresolved(v)]
            if behind:
                waiting.extend(behind)
            else:
                waiting.pop()
                self._solved[last] = (
                    self.substitute(self._solved[last]) if self._is_unresolved(last) else self._solved[last]
                )
        return self._solved[variable]

    def _is_unresolved(self, variable: int) -> bool:
        return any(v in self._solved for v in self._solved[variable])

    def set_to_zero(self, form: LinearForm) -> None:
        """Add the equation that the linear form is 0."""
        form = self.substitute(form)
        if not form:
            return
        latest = max(form)
        pivot = form[latest]
        self._solved[latest] = {v: _divide_exactly(-c, pivot) for v, c in form.items() if v != latest}

    def find_free_variables(self, variables: Iterable[int]) -> list[int]:
        """Return those of the variables that are not solved."""
        return [v for v in variables if v not in self._solved]


def _divide_exactly(over: Fraction | int, under: Fraction | int) -> Fraction | int:
    if under in (1, -1):
        return over * int(under)
    quotient = Fraction(over) / Fraction(under)
    return quotient.numerator if quotient.denominator == 1 else quotient


def add_scaled_form(
    one: Mapping[int, Fraction | int], two: Mapping[int, Fraction | int], factor: Fraction | int = 1
) -> LinearForm:
    """Return ``one + factor * two``."""
    total = dict(one)
    for variable, coefficient in two.items():
        value = total.get(variable, 0) + factor * coefficient
        if value:
            total[variable] = value
        else:
            total.pop(variable, None)
    return total


def equate_factors(system: Elimination, forms: Mapping[int, LinearForm], quads: NDArray[np.int64]) -> None:
    """Add the equation ``(h - t) - (H - T) = 0`` for every row ``h, t, H, T`` of form indices.

    There is a row for every entry of a weight, but far fewer independent equations: if each of the four indices depends
    only on the row or only on the column of the entry, it suffices to use every row and every column once. Which two
    belong together follows from the number of distinct pairs. All equations are verified at the end.
    """
    while len(quads):
        pairings = [[(0, 2), (1, 3)], [(0, 3), (1, 2)], [(0, 1), (2, 3)]]
        firsts = [np.concatenate([find_first_pairs(quads[:, a], quads[:, b]) for a, b in pairs]) for pairs in pairings]
        for h, t, H, T in quads[np.unique(min(firsts, key=len))].tolist():
            form = add_scaled_form(forms[h], forms[t], -1)
            system.set_to_zero(add_scaled_form(add_scaled_form(form, forms[H], -1), forms[T]))
        quads = quads[np.abs(evaluate_forms(system, forms, quads) @ np.array([1.0, -1.0, -1.0, 1.0])) > 1e-9]


def find_first_pairs(one: NDArray[np.int64], two: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position where each distinct pair first occurs."""
    (a, size), (b, width) = _compute_dense_ranks(one), _compute_dense_ranks(two)
    keys = a * width + b
    if size * width > 4 * len(keys):
        found: NDArray[np.int64] = np.unique(keys, return_index=True)[1]
        return found
    places = np.full(size * width, -1)
    places[keys[::-1]] = np.arange(len(keys))[::-1]
    return places[places >= 0]


def select_independent_entries(*sides: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the entries of arrays of one shape at enough positions to determine any sum of them everywhere.

    A weight has a head for every row and a tail for every column. A sum of a function of the row and a function of the
    column is determined by the first row and the first column.

    Example:
        >>> rows, columns = np.array([[2, 2, 2], [3, 3, 3]]), np.array([[4, 5, 6], [4, 5, 6]])
        >>> select_independent_entries(rows, columns).tolist()
        [[2, 4], [3, 4], [2, 4], [2, 5], [2, 6]]
    """
    if not sides[0].size:
        return np.empty((0, len(sides)), dtype=np.int64)
    parts: list[set[int]] = []
    for side in sides:
        axes = {axis for axis, size in enumerate(collapse_repeats(side).shape) if size > 1}
        # Arrays that vary along a common axis form one part of the sum.
        together = axes.union(*(part for part in parts if part & axes))
        parts = [*(part for part in parts if not part & axes), together]
    found = []
    for part in parts:
        line = tuple(slice(None) if axis in part else slice(1) for axis in range(sides[0].ndim))
        found.append(np.stack([side[line].reshape(-1) for side in sides], 1))
    return np.concatenate(found)


def collapse_repeats(side: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the array reduced to size 1 along axes on which it is constant.

    Example:
        >>> collapse_repeats(np.array([[2, 2, 2], [3, 3, 3]])).tolist()
        [[2], [3]]
    """
    for axis in reversed(range(side.ndim if side.size else 0)):
        # If entries differ, the first line usually shows it.
        line = side[tuple(slice(None) if each == axis else 0 for each in range(side.ndim))]
        if len(line) > 1 and not bool((line != line[0]).any()):
            first = side.take([0], axis)
            side = side if bool((side != first).any()) else first
    return side


def _compute_dense_ranks(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return the ranks of the numbers, from 0 without gaps, and the number of distinct ones."""
    kinds, places = _find_unique(numbers)
    return places, len(kinds)


def _find_unique(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorted distinct numbers, and the index of each number among them; faster than sorting."""
    highest = int(numbers.max(initial=-1))
    if highest > 4 * numbers.size:
        kinds, places = np.unique(numbers, return_inverse=True)
        return kinds, places.reshape(numbers.shape)
    there = np.zeros(highest + 1, dtype=bool)
    there[numbers] = True
    return np.flatnonzero(there), (np.cumsum(there) - 1)[numbers]


def evaluate_forms(
    system: Elimination, forms: Mapping[int, LinearForm], numbers: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the values of linear forms at generic values of the free variables.

    Forms that differ have different values.
    """
    kinds, places = _find_unique(numbers)
    resolved = [system.substitute(forms[number]) for number in kinds.tolist()]
    values = np.array([sum(float(c) * math.sin(1.0 + v * math.e) for v, c in form.items()) for form in resolved], float)
    found: NDArray[np.float64] = values[places]
    return found


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
