"""Second derivatives of a network along one direction per parameter, by differentiating forward.

Where one parameter p moves along v, the loss has the second derivative

.. math::
    v' H_p v = v' G_p v + \\sum_m g_m \\cdot D^2 \\varphi_m [a_m, a_m]

over all operations m of the network, with the gradient g of the loss by the operation's output and the first
derivatives a of its inputs along v. The gradients take one backward pass for all parameters. The first derivatives are
those of forward mode: those of all parameters that an operation depends on, stacked, go through it together. The second
derivative of an operation is zero where it is linear in all that moves, as a convolution whose weight or whose input
moves, but not both. So nothing is differentiated backward twice, and a parameter all of whose operations are linear, or
piecewise linear, is found to be so without any numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from saltflat.engine.operation_derivatives import (
    WRITTEN_OUT,
    contract_second,
    copy_plainly,
    differentiate,
    is_linear,
)
from saltflat.errors import NotDefinedError

_Found = TypeVar("_Found")

SPELLINGS = {"radd": "add", "rmul": "mul"}
COMPOSITE = ("torch.nn.functional", "torch.functional")  # whose functions in Python call others
STOPS = frozenset(["detach", "detach_"])


class NotTraceableError(NotDefinedError):
    """An operation does something that derivatives are not carried through."""


@dataclass(frozen=True)
class Tangents:
    """First derivatives of a tensor along the directions of some rows.

    Attributes:
        rows: their numbers, in increasing order.
        values: ``(rows, *shape)``.
    """

    rows: tuple[int, ...]
    values: Tensor

    def select_rows(self, rows: tuple[int, ...]) -> Tensor:
        """Return the derivatives of some of the rows."""
        if rows == self.rows:
            return self.values
        places = {row: place for place, row in enumerate(self.rows)}
        return self.values[[places[row] for row in rows]]


class DerivativeTrace(TorchFunctionMode):
    """Watches a forward pass: which parameters each tensor depends on, and along which of them it is curved.

    Sets of parameters are bits of whole numbers. A forward pass inside has to be run with gradients on.

    Attributes:
        reach: the parameters that each tensor depends on.
        curved: the parameters along which some operation may have a second derivative.
        edges: where the gradients of those operations that may have one along some direction are found.
        bytes: of all results.
        widest: bytes of the largest.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self.reach: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.curved = 0
        self.edges: list[list[GradientEdge | None]] = []
        self.bytes = self.widest = 0
        self._viewed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for number, leaf in enumerate(leaves):
            self.reach[leaf] = 1 << number

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, and follow the derivatives through it."""
        kwargs = kwargs or {}
        call = Call.read(func, args, kwargs, self.reach)
        if not call.moving or not torch.is_grad_enabled() or call.name in STOPS:
            return func(*args, **kwargs)
        if isinstance(func, FunctionType) and func.__module__ in COMPOSITE and func.__closure__ is None:
            with self:
                return _open_function(func)(*args, **kwargs)
        if call.name in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[call.name](*args, **kwargs)
        if call.in_place:
            self._check_in_place(call)
        return self.follow_call(call, lambda: func(*args, **kwargs))

    def follow_call(self, call: Call, run: Callable[[], _Found]) -> _Found:
        """Run a call, and record what its outputs depend on."""
        curved, is_recorded = call.find_curved(self.reach)
        outputs = run()
        results = select_floats(outputs)
        if not results:
            return outputs
        self.curved |= curved
        if is_recorded:
            self.edges.append([get_gradient_edge(each) if each.requires_grad else None for each in results])
        self.mark_outputs(call, results)
        return outputs

    def mark_outputs(self, call: Call, results: Sequence[Tensor]) -> None:
        """Record which parameters the outputs depend on."""
        bits = 0
        for _, tensor in call.moving:
            bits |= self.reach[tensor]
        for each in results:
            self.reach[each] = bits
            size = each.numel() * each.element_size()
            self.bytes, self.widest = self.bytes + size, max(self.widest, size)
            for _, tensor in call.moving:
                if tensor is not each and tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr():
                    self._viewed[tensor] = self._viewed[each] = True

    def compute_gradients(self, total: Tensor) -> list[list[Tensor | None]]:
        """Return the gradients of a sum by the outputs of the recorded operations."""
        edges = [edge for each in self.edges for edge in each if edge is not None]
        found: Iterator[Tensor | None] = iter(
            torch.autograd.grad(total, edges, allow_unused=True)
            if edges and total.requires_grad
            else [None] * len(edges)
        )
        return [[None if edge is None else next(found) for edge in each] for each in self.edges]

    def _check_in_place(self, call: Call) -> None:
        target = call.leaves[0]
        known = isinstance(target, Tensor) and target in self.reach and target not in self._viewed
        if call.function is None or not known:
            raise NotTraceableError(f"{call.name} writes to a tensor that others share")


@dataclass(frozen=True)
class Call:
    """A call of a function of torch.

    Attributes:
        name: of the function, without underscores.
        function: the function, or one that returns what the function writes; None if there is none.
        leaves: all arguments, in lists and dictionaries too.
        structure: of the arguments.
        roles: the position or the name of the argument that each leaf belongs to.
        moving: places among the leaves of tensors that depend on parameters, and these.
        in_place: whether the function writes to its first argument.
    """

    name: str
    function: Callable[..., Any] | None
    leaves: list[Any]
    structure: Any
    roles: list[int | str]
    moving: list[tuple[int, Tensor]]
    in_place: bool

    @classmethod
    def read(
        cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], reach: WeakTensorKeyDictionary
    ) -> Call:
        """Describe a call."""
        leaves, structure = tree_flatten((args, dict(kwargs)))
        moving = [(place, each) for place, each in enumerate(leaves) if isinstance(each, Tensor) and each in reach]
        if not moving:
            return cls("", func, leaves, structure, [], [], False)
        roles: list[int | str] = [number for number, each in enumerate(args) for _ in tree_leaves(each)]
        roles += [key for key, each in kwargs.items() for _ in tree_leaves(each)]
        if len(roles) != len(leaves):
            raise NotTraceableError("arguments of an unknown structure")
        name, function, in_place = _find_function(func)
        name = SPELLINGS.get(name, name)
        return cls(name, function, leaves, structure, roles, moving, in_place)

    def is_linear(self, places: Collection[int]) -> bool:
        """Return whether the function is linear, or piecewise linear, in the arguments at these places together."""
        return is_linear(self.name, [self.roles[place] for place in places])

    def find_curved(self, reach: WeakTensorKeyDictionary) -> tuple[int, bool]:
        """Return the parameters along which it is curved, and whether it is along some direction of all of them."""
        curved, every = 0, 0
        for bits, places in self._group_places([(place, reach[tensor]) for place, tensor in self.moving]):
            if not self.is_linear(places):
                curved |= bits
            every |= bits
        return curved, not self.is_linear([place for place, _ in self.moving])

    @staticmethod
    def _group_places(held: list[tuple[int, int]]) -> list[tuple[int, tuple[int, ...]]]:
        """Return disjoint sets of parameters, each with the places that all of its parameters reach."""
        groups: list[tuple[int, tuple[int, ...]]] = []
        for place, bits in held:
            split = []
            for inside, places in groups:
                split += [(inside & bits, (*places, place)), (inside & ~bits, places)]
                bits &= ~inside
            groups = [each for each in [*split, (bits, (place,))] if each[0]]
        return groups

    def make_function(self, places: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the call as a function of the tensors at these places, with the floating-point results."""
        chosen = copy_plainly if self.name in ("clone", "contiguous") else self.function
        if chosen is None:
            raise NotTraceableError(f"{self.name} only writes to a tensor")

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            leaves = list(self.leaves)
            for place, value in zip(places, values, strict=True):
                leaves[place] = value
            args, kwargs = tree_unflatten(leaves, self.structure)
            return tuple(select_floats(chosen(*args, **kwargs)))

        return run


class TangentPass(DerivativeTrace):
    """Carries first derivatives through a forward pass, and adds up what the curvature of each operation contributes.

    Args:
        leaves: the parameters.
        tangents: of each parameter that moves in some row.
        gradients: of the loss by the outputs of the operations that a :class:`DerivativeTrace` recorded.
        count: number of rows.

    Attributes:
        second: ``(count,)``, the sum over all operations.
        tangents: of each tensor.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        tangents: Mapping[int, Tangents],
        gradients: Sequence[Sequence[Tensor | None]],
        count: int,
    ) -> None:
        super().__init__(leaves)
        self.second = torch.zeros(count, dtype=torch.float64, device=leaves[0].device)
        self.gradients = gradients
        self.tangents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for number, own in tangents.items():
            self.tangents[leaves[number]] = own
        self._next = 0

    def follow_call(self, call: Call, run: Callable[[], _Found]) -> _Found:
        """Run a call, and differentiate it along all rows that reach it."""
        is_recorded = call.find_curved(self.reach)[1]
        if call.in_place:  # the derivatives are those at what will be overwritten
            call = replace(call, leaves=[call.leaves[0].clone(), *call.leaves[1:]])
        outputs = run()
        results = select_floats(outputs)
        if not results:
            return outputs
        gradients = None
        if is_recorded:
            if self._next == len(self.gradients):
                raise NotTraceableError("another pass ran other operations")
            gradients = self.gradients[self._next]
            self._next += 1
        moved = self._differentiate(call, gradients)
        self.mark_outputs(call, results)
        for number, each in enumerate(results):
            if moved:
                self.tangents[each] = _join_tangents([(rows, values[number]) for rows, values in moved])
            elif each in self.tangents:
                del self.tangents[each]
        return outputs

    def get_tangents(self, outputs: Tensor) -> dict[int, Tensor]:
        """Return the derivatives of the network's outputs, by row."""
        found = self.tangents.get(outputs)
        return {} if found is None else dict(zip(found.rows, found.values, strict=True))

    def _differentiate(
        self, call: Call, gradients: Sequence[Tensor | None] | None
    ) -> list[tuple[tuple[int, ...], tuple[Tensor, ...]]]:
        """Return the derivatives of the results, by sets of rows that move the same arguments."""
        own = {place: self.tangents[tensor] for place, tensor in call.moving if tensor in self.tangents}
        patterns: dict[tuple[int, ...], list[int]] = {}
        for row in sorted({row for each in own.values() for row in each.rows}):
            patterns.setdefault(tuple(place for place in own if row in own[place].rows), []).append(row)
        moved = []
        for places, found in patterns.items():
            rows = tuple(found)
            function = call.make_function(places)
            points = tuple(call.leaves[place].detach() for place in places)
            along = tuple(own[place].select_rows(rows) for place in places)
            if gradients is None or call.is_linear(places):
                moved.append((rows, differentiate(function, points, along)))
                continue
            roles = [call.roles[place] for place in places]
            arguments = dict(zip(call.roles, call.leaves, strict=True))
            first, second = contract_second(call.name, arguments, roles, function, points, along, gradients)
            moved.append((rows, first))
            self.second[list(rows)] += second
        return moved


def _join_tangents(parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tangents:
    """Put the derivatives of several sets of rows into one array, in increasing order of rows."""
    if len(parts) == 1:
        return Tangents(*parts[0])
    rows = [row for part, _ in parts for row in part]
    values = torch.cat([each for _, each in parts])
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if order != list(range(len(rows))):
        values = values[order]
    return Tangents(tuple(sorted(rows)), values)


def differentiate_twice(
    total: Tensor, leaves: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[float, set[int]]:
    """Return the second derivative of a sum along all directions together, and the numbers of leaves without gradient.

    By reverse mode.
    """
    if not total.requires_grad:
        return 0.0, set(range(len(leaves)))
    gradients = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    silent = {number for number, each in enumerate(gradients) if each is None or not each.any()}
    parts = [(each * v).sum() for each, v in zip(gradients, directions, strict=True) if each is not None]
    inner = sum(parts, torch.zeros((), dtype=torch.float64, device=total.device))
    if not inner.requires_grad:
        return 0.0, silent
    second = torch.autograd.grad(inner, leaves, retain_graph=True, allow_unused=True)
    return float(sum((each * v).sum() for each, v in zip(second, directions, strict=True) if each is not None)), silent


def select_floats(outputs: object) -> list[Tensor]:
    """Return the floating-point tensors among the results of a call."""
    return [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.is_floating_point()]


@cache
def _find_function(func: Callable[..., Any]) -> tuple[str, Callable[..., Any] | None, bool]:
    """Return the name of a function, one that returns the same without writing, and whether it writes."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property
        for read in ("T", "mT", "H", "mH"):
            if func == getattr(Tensor, read).__get__:
                return "transpose", func, False
        return "detach", func, False
    if name == "__setitem__":
        return name, None, True
    if name.startswith("__"):
        short = name.strip("_")
        if short.startswith("i") and hasattr(Tensor, f"__{short[1:]}__") and short != "invert":
            return short[1:], getattr(Tensor, f"__{short[1:]}__"), True
        return short, func, False
    if name.endswith("_"):
        short = name.rstrip("_")
        return short, getattr(torch, short, getattr(Tensor, short, None)), True
    return name, func, False


@cache
def _open_function(func: FunctionType) -> Callable[..., Any]:
    """Return a function of torch that does not ask modes to replace it, so that a mode sees the calls inside."""

    def find_none(*args: object) -> bool:
        return False

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    opened = FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(names, find_none)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
