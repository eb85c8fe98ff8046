"""Trace a forward pass: run every operation unchanged, and record how it transforms scales.

Operations are intercepted where torch dispatches them to its kernels. At this level all models look alike: attention
consists of matrix products and a softmax, and a forward pass may take any path that does not depend on values.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from saltflat.errors import ModelError, SaltflatError, format_error_line
from saltflat.symmetry.equality import ModelInputs
from saltflat.symmetry.tracing.entries import ParameterEntries
from saltflat.symmetry.tracing.scales import (
    ANY,
    GROUND,
    NO_STORAGE,
    ScaleSystem,
    TensorScales,
    copy_in_memory_order,
    get_storage_address,
    has_same_storage,
    make_constant_scales,
)

OperationResult: TypeAlias = Tensor | Sequence[Tensor | None] | float | None


@dataclass(frozen=True)
class Obstacle:
    """An operation that fixes the scales of its operands.

    Attributes:
        operation: its name in torch.
        where: the module that called it; "" for the model itself.
        line: the line of code that called it.
        known: whether a rule exists for it; without one, all scales it involves are assumed fixed.
        pinned: number of scales that were free before.
    """

    operation: str
    where: str
    line: str
    known: bool
    pinned: int


class OperationCall:
    """A traced operation with its arguments and result, as passed to its rule."""

    def __init__(
        self,
        tracker: ScaleTracker,
        name: str,
        func: OpOverload | OpOverloadPacket[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: OperationResult,
    ) -> None:
        self.tracker, self.name, self.func, self.args, self.kwargs = tracker, name, func, args, kwargs
        self.out: Any = out  # each rule knows which of the possible results its operations return
        self.scales, self.entries = tracker.scales, tracker.entries

    def get_argument(self, position: int, name: str, default: float | None = None) -> Any:
        """Return an argument by its position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def get_scale_ids(self, value: Tensor | float) -> Tensor:
        """Return the scales of a tensor or number."""
        marks = self.tracker.get_tensor_scales(value)
        return self.entries.look_up_scales(marks.ids) if marks.entries else marks.ids

    def get_entry_numbers(self, value: Tensor | float) -> Tensor | None:
        """Return the numbers of the parameter entries in a tensor, or None if it holds other values."""
        if not isinstance(value, Tensor):
            return None
        marks = self.tracker.get_tensor_scales(value)
        return marks.ids if marks.entries else None

    def is_constant(self, value: Tensor | float) -> bool:
        """Return whether a value depends on constants only."""
        return not isinstance(value, Tensor) or self.tracker.get_tensor_scales(value).fixed[0]

    def make_fixed_scales(self, like: Tensor | None = None) -> Tensor:
        """Return fixed scales in the shape of ``like``, by default of the result."""
        return torch.full((self.out if like is None else like).shape, GROUND, dtype=torch.float64)

    def pin(self, *values: Tensor | float, known: bool = True) -> None:
        """Fix the scales of values."""
        self.tracker.pin(self.name, [self.get_scale_ids(value) for value in values], known)


Rule = Callable[[OperationCall], Any]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations of these names, separated by spaces, and their in-place variants.

    A rule returns an array of scales for the result, a :class:`TensorScales`, or one of these for each of several
    results.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def is_view(name: str) -> bool:
    """Return whether an operation only rearranges entries, so that its result may be a view of its operand."""
    return getattr(RULES.get(name), "moves", False)


class ScaleTracker(TorchDispatchMode):
    """Tracks the scales of all tensors while operations run.

    Args:
        members: parameters and running statistics, by name.
        inputs: inputs of the forward pass.
        names: module names by ``id``, for messages.
        operations: the operations of the pass in order, each with whether the outputs depend on it; operations without
            effect are not tracked. If the pass deviates from this sequence, all further operations are tracked.
    """

    def __init__(
        self,
        members: Mapping[str, Tensor],
        inputs: ModelInputs,
        names: Mapping[int, str],
        operations: Sequence[tuple[str, bool]] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scales = ScaleSystem()
        self.entries = ParameterEntries(self.scales, members)
        self.names = names
        self._operations = iter(operations)
        self.obstacles: dict[tuple[str, str, str], Obstacle] = {}
        self.epsilons: dict[int, float] = {}  # by the number of the first entry of a variance
        # References to the tensors keep their ids from being reused.
        self._known: dict[int, tuple[Tensor, TensorScales]] = {}
        # Memory of masks, token ids and everything computed from these alone.
        self._discrete_memory: set[int] = set()
        self.assumed: dict[str, None] = {}
        for name, value in members.items():
            self._store_tensor_scales(
                value, TensorScales(copy_in_memory_order(self.entries.get_numbers(name, value), value), True, [False])
            )
        for leaf in tree_flatten(inputs)[0]:
            if isinstance(leaf, Tensor):
                ground = torch.full(leaf.shape, GROUND, dtype=torch.float64)
                self._store_tensor_scales(leaf, TensorScales(copy_in_memory_order(ground, leaf), False, [False]))
                if not leaf.is_floating_point() and not leaf.is_complex():
                    self._discrete_memory.add(get_storage_address(leaf))
        self._discrete_memory.discard(NO_STORAGE)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, reaches = next(self._operations, ("", True))
        if name != str(func):
            self._operations, reaches = iter(()), True
        if not reaches:
            return out
        try:
            self._track_operation(func, args, kwargs, out)
        except SaltflatError:
            raise
        except Exception as error:
            at = self.find_location()
            raise ModelError(
                f"Expected a forward pass of ordinary tensor operations, but got the operation {func} "
                f"({at.line or at.module or 'in the model itself'}), which cannot be traced "
                f"({format_error_line(error)}). Try removing this operation, or passing the part of the model without "
                "it."
            ) from error
        return out

    def _track_operation(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: OperationResult
    ) -> None:
        schema = func._schema
        full = schema.name.removeprefix("aten::")
        in_place = schema.is_mutable and full.endswith("_") and bool(args) and isinstance(args[0], Tensor)
        name = full.removesuffix("_") if in_place else full
        # The destination of a result (out=...) is not an operand.
        results = {
            arg.name for arg in schema.arguments if arg.kwarg_only and arg.alias_info and arg.alias_info.is_write
        }
        function: OpOverload | OpOverloadPacket[..., Any] = func
        if results & kwargs.keys():
            function, kwargs = func.overloadpacket, {key: kwargs[key] for key in kwargs.keys() - results}
        call = OperationCall(self, name, function, args, kwargs, out)
        discrete = self._is_discrete_result(call)
        for tensor, marks in zip(tree_flatten(out)[0], self._apply_rule(call), strict=True):
            if isinstance(tensor, Tensor):
                self._store_result(tensor, marks, schema.is_mutable, is_view(name))
                (self._discrete_memory.add if discrete else self._discrete_memory.discard)(get_storage_address(tensor))
                self._discrete_memory.discard(NO_STORAGE)

    def _is_discrete_result(self, call: OperationCall) -> bool:
        """Return whether the result depends only on constants and on integer or boolean inputs."""
        if torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()):
            return False
        leaves = tree_flatten((call.args, call.kwargs))[0]
        return all(self.is_discrete(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    def is_discrete(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends only on constants and on integer or boolean inputs."""
        return get_storage_address(tensor) in self._discrete_memory or self.get_tensor_scales(tensor).fixed[0]

    def record_assumption(self) -> None:
        """Record the current line of code, where control flow depends on a value."""
        at = self.find_location()
        self.assumed[at.line or at.module] = None

    def _apply_rule(self, call: OperationCall) -> list[Any]:
        """Return the scales of each result."""
        tensors = [leaf for leaf in tree_flatten((call.args, call.kwargs))[0] if isinstance(leaf, Tensor)]
        outs = tree_flatten(call.out)[0]
        if torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()) and call.name not in RULES:
            # Random numbers differ between passes: they are like inputs, not like constants.
            self.pin(call.name, [call.get_scale_ids(tensor) for tensor in tensors], known=True)
            return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in outs]
        # Views of constants are tracked, since writing to one changes all.
        if all(self.get_tensor_scales(tensor).fixed[0] for tensor in tensors) and not (tensors and is_view(call.name)):
            return [make_constant_scales(out) for out in outs]
        if call.name in RULES:
            try:
                found = RULES[call.name](call)
                found = list(found) if isinstance(found, list | tuple) else [found]
                if [_get_shape(each) for each in found] == [_get_shape(out) for out in outs]:
                    return found
            except SaltflatError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                # The rule does not support these arguments: proceed as without a rule.
                pass
        self.pin(call.name, [call.get_scale_ids(tensor) for tensor in tensors], known=False)
        return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in outs]

    def _store_result(self, tensor: Tensor, found: TensorScales | Tensor, written: bool, view: bool) -> None:
        marks = found if isinstance(found, TensorScales) else TensorScales(found, False, [False])
        if not view:
            # A separate array: writing to the result must not change the operand.
            marks = TensorScales(copy_in_memory_order(marks.ids, tensor), marks.entries, [marks.fixed[0]])
        before = self._known.get(id(tensor))
        if not written or before is None or before[1].ids.shape != tensor.shape:
            self._store_tensor_scales(tensor, marks)
            return
        # Update in place, so that views of the same memory change too.
        old = before[1]
        if old.entries and not marks.entries and bool((marks.ids != ANY).any()):
            self._demote_entries(old)
            old = self._known[id(tensor)][1]
        old.ids.copy_(self.entries.look_up_scales(marks.ids) if marks.entries and not old.entries else marks.ids)
        old.fixed[0] = old.fixed[0] and marks.fixed[0]

    def _demote_entries(self, marks: TensorScales) -> None:
        """Treat a copy of a parameter and all its views as ordinary values from now on."""
        for tensor, each in [*self._known.values()]:
            if each.entries and has_same_storage(each.ids, marks.ids):
                self._store_tensor_scales(tensor, TensorScales(each.ids, False, each.fixed))
        every = torch.empty(0, dtype=torch.float64).set_(marks.ids.untyped_storage())
        every.copy_(self.entries.look_up_scales(every))

    def _store_tensor_scales(self, tensor: Tensor, marks: TensorScales) -> None:
        self._known[id(tensor)] = tensor, marks

    def get_tensor_scales(self, value: Tensor | float) -> TensorScales:
        """Return the scales of a tensor; unknown tensors are constants."""
        if not isinstance(value, Tensor):
            return make_constant_scales(torch.as_tensor(value, dtype=torch.float64))
        known = self._known.get(id(value))
        if known is None:
            self._store_tensor_scales(value, make_constant_scales(value))
            known = self._known[id(value)]
        return known[1]

    def pin(self, name: str, arrays: list[Tensor], known: bool) -> None:
        """Fix scales on behalf of an operation, and record it as an obstacle if any were free or it has no rule."""
        pinned = sum([self.scales.pin(ids) for ids in arrays])
        if pinned or not known:
            at = self.find_location()
            key = name, at.module, at.line
            already = self.obstacles[key].pinned if key in self.obstacles else 0
            operation = name.replace("::", ".") if "::" in name else f"aten.{name}"
            self.obstacles[key] = Obstacle(operation, at.module, at.line, known, pinned + already)

    def find_location(self) -> CodeLocation:
        """Return the current position in the model's code."""
        return find_code_location(self.names)


def _get_shape(value: TensorScales | Tensor | float | None) -> torch.Size | None:
    value = value.ids if isinstance(value, TensorScales) else value
    return value.shape if isinstance(value, Tensor) else None


def replay_on_ids(call: OperationCall, indices: Sequence[Any] = ()) -> Any:
    """Apply the operation to scale numbers instead of values; tensors in ``indices`` stay as they are."""
    where = {id(leaf) for leaf in tree_flatten(indices)[0]}
    leaves = tree_flatten((call.args, call.kwargs))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in where]
    operands = [call.tracker.get_tensor_scales(tensor) for tensor in tensors]
    entries = bool(operands) and all(m.entries for m in operands)
    for marks in operands:
        if marks.entries and not entries:
            # A parameter that is concatenated with values, such as a class token, is treated like them.
            call.entries.record_addition(marks.ids, call.entries.look_up_scales(marks.ids))

    def replace_leaf(leaf: Tensor | torch.device) -> Tensor | torch.device:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if id(leaf) in where:
            return leaf.cpu()
        return call.tracker.get_tensor_scales(leaf).ids if entries else call.get_scale_ids(leaf)

    args, kwargs = tree_map_only((Tensor, torch.device), replace_leaf, (call.args, call.kwargs))
    found: list[TensorScales | None] = []
    for ids in tree_flatten(call.func(*args, **kwargs))[0]:
        # Views share whether their memory still is constant.
        shared = len(operands) == 1 and isinstance(ids, Tensor) and has_same_storage(ids, operands[0].ids)
        fixed = operands[0].fixed if shared else [all(m.fixed[0] for m in operands)]
        found.append(TensorScales(ids, entries, fixed) if isinstance(ids, Tensor) else None)
    return found


LIBRARY = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision


class CodeLocation(NamedTuple):
    """The innermost module of the model, and the innermost line of code outside of torch."""

    module: str
    line: str


def find_code_location(names: Mapping[int, str]) -> CodeLocation:
    """Return the current position in the forward pass of a model with these modules."""
    frame: FrameType | None = sys._getframe(1)
    module, line = None, ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(LIBRARY) and module is not None:
            break  # the caller of the model
        owner = frame.f_locals.get("self")
        if module is None and isinstance(owner, nn.Module):
            module = names.get(id(owner))
        if not line and not file.startswith((LIBRARY, TORCH, "<frozen")):
            text = linecache.getline(file, frame.f_lineno).strip()
            line = f"{Path(file).name}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back
    return CodeLocation(module or "", line)
