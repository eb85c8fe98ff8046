"""Trace a forward pass: every operation runs as always, and what it does to scales is recorded.

Operations are seen where torch itself hands them to its kernels. There every model looks alike: attention is matrix
products and a softmax, whoever wrote it, and a forward pass may take any path that does not depend on the values.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.errors import ModelError, SaltflatError, format_error_line
from saltflat.symmetry.tracing.entries import ParameterEntries
from saltflat.symmetry.tracing.scales import (
    ANY,
    GROUND,
    NOWHERE,
    ScaleSystem,
    TensorScales,
    copy_in_memory_order,
    get_storage_address,
    has_same_storage,
    make_constant_scales,
)


@dataclass(frozen=True)
class Obstacle:
    """An operation that does not let the scale of what it is given vary.

    Attributes:
        operation: its name in torch.
        where: the module it happened in, "" for the model itself.
        line: the line of code that called it.
        known: False if there is no rule for it: everything it touches was then taken as fixed.
        pinned: how many scales were free before.
    """

    operation: str
    where: str
    line: str
    known: bool
    pinned: int


class OperationCall:
    """One operation that was done, as its rule sees it."""

    def __init__(
        self, watch: ScaleTracker, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ):
        self.watch, self.name, self.func, self.args, self.kwargs, self.out = watch, name, func, args, kwargs, out
        self.scales, self.entries = watch.scales, watch.entries

    def get_argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def get_scale_ids(self, value: Any) -> Tensor:
        """The scales of a tensor or number."""
        marks = self.watch.get_tensor_scales(value)
        return self.entries.look_up_scales(marks.ids) if marks.entries else marks.ids

    def get_entry_numbers(self, value: Any) -> Tensor | None:
        """The numbers of the parameter entries that a tensor holds, if it does."""
        if not isinstance(value, Tensor):
            return None
        marks = self.watch.get_tensor_scales(value)
        return marks.ids if marks.entries else None

    def is_constant(self, value: Any) -> bool:
        """Whether a value depends on constants only."""
        return not isinstance(value, Tensor) or self.watch.get_tensor_scales(value).fixed[0]

    def make_fixed_scales(self, like: Any = None) -> Tensor:
        """Fixed scales for an array of this one's shape, or of the result's."""
        like = self.out if like is None else like
        return torch.full(like.shape, GROUND, dtype=torch.float64)

    def pin(self, *values: Any, known: bool = True) -> None:
        self.watch.pin(self.name, [self.get_scale_ids(value) for value in values], known)


Rule = Callable[[OperationCall], Any]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register what operations of these names do to scales; one with ``_`` behind its name does it in place.

    A rule gives an array of scales for the result, :class:`TensorScales`, or one of them for each tensor of
    several results.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def is_view(name: str) -> bool:
    """Whether an operation only moves numbers about, so that its result may be a part of what it is given."""
    return getattr(RULES.get(name), "moves", False)


class ScaleTracker(TorchDispatchMode):
    """While it is entered, what happens to the tensors it was told of.

    Args:
        members: parameters, and the running statistics that follow what they are taken of, by name.
        inputs: what the forward pass is given.
        names: of the modules, to say where something happened.
        operations: those of the pass in order, each with whether it has a part in the outputs; others are not
            followed. Once the pass does something else, all are.
    """

    def __init__(
        self,
        members: Mapping[str, Tensor],
        inputs: Any,
        names: Mapping[int, str],
        operations: Sequence[tuple[str, bool]] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scales = ScaleSystem()
        self.entries = ParameterEntries(self.scales, members)
        self.names = names
        self._operations = iter(operations)
        self.obstacles: dict[tuple[str, str, str], Obstacle] = {}
        self.epsilons: dict[int, float] = {}  # by the number of a variance's first entry
        # The tensors are kept, so that no other takes the place of one that is gone.
        self._known: dict[int, tuple[Tensor, TensorScales]] = {}
        # Where the values of masks, token numbers and what is computed from them alone are stored.
        self._plain: set[int] = set()
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
                    self._plain.add(get_storage_address(leaf))
        self._plain.discard(NOWHERE)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
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
                f"({at.line or at.module or 'in the model itself'}), which cannot be followed "
                f"({format_error_line(error)}). Try leaving this operation out of the model, or taking the part of "
                "the model without it."
            ) from error
        return out

    def _track_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        schema = func._schema
        full = schema.name.removeprefix("aten::")
        in_place = schema.is_mutable and full.endswith("_") and bool(args) and isinstance(args[0], Tensor)
        name = full.removesuffix("_") if in_place else full
        # Where a result goes (out=...) is no part of what it is made of.
        results = {
            arg.name for arg in schema.arguments if arg.kwarg_only and arg.alias_info and arg.alias_info.is_write
        }
        if results & kwargs.keys():
            func, kwargs = func.overloadpacket, {key: kwargs[key] for key in kwargs.keys() - results}
        call = OperationCall(self, name, func, args, kwargs, out)
        plain = self._is_discrete_result(call)
        for tensor, marks in zip(tree_flatten(out)[0], self._apply_rule(call), strict=True):
            if isinstance(tensor, Tensor):
                self._store_result(tensor, marks, schema.is_mutable, is_view(name))
                (self._plain.add if plain else self._plain.discard)(get_storage_address(tensor))
                self._plain.discard(NOWHERE)

    def _is_discrete_result(self, call: OperationCall) -> bool:
        """Whether the result depends on nothing but constants and the inputs that are whole numbers or masks."""
        if torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()):
            return False
        leaves = tree_flatten((call.args, call.kwargs))[0]
        return all(self.is_discrete(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    def is_discrete(self, tensor: Tensor) -> bool:
        return get_storage_address(tensor) in self._plain or self.get_tensor_scales(tensor).fixed[0]

    def record_assumption(self) -> None:
        """Remember the line that decides by a value how the forward pass goes on."""
        at = self.find_location()
        self.assumed[at.line or at.module] = None

    def _apply_rule(self, call: OperationCall) -> list[Any]:
        """What is known of each result."""
        tensors = [leaf for leaf in tree_flatten((call.args, call.kwargs))[0] if isinstance(leaf, Tensor)]
        outs = tree_flatten(call.out)[0]
        if torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()) and call.name not in RULES:
            # Random numbers are others the next time: like inputs, not like constants.
            self.pin(call.name, [call.get_scale_ids(tensor) for tensor in tensors], known=True)
            return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in outs]
        # Of views of constants, what is written to one is written to all.
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
                # Called in a way that the rule does not know: as if there were none.
                pass
        self.pin(call.name, [call.get_scale_ids(tensor) for tensor in tensors], known=False)
        return [call.make_fixed_scales(out) if isinstance(out, Tensor) else None for out in outs]

    def _store_result(self, tensor: Tensor, found: Any, written: bool, view: bool) -> None:
        marks = found if isinstance(found, TensorScales) else TensorScales(found, False, [False])
        if not view:
            # An array of its own: what is written to the result is not written to what it was made of.
            marks = TensorScales(copy_in_memory_order(marks.ids, tensor), marks.entries, [marks.fixed[0]])
        before = self._known.get(id(tensor))
        if not written or before is None or before[1].ids.shape != tensor.shape:
            self._store_tensor_scales(tensor, marks)
            return
        # In place: what is a view of the same memory sees it too.
        old = before[1]
        if old.entries and not marks.entries and bool((marks.ids != ANY).any()):
            self._demote_entries(old)
            old = self._known[id(tensor)][1]
        old.ids.copy_(self.entries.look_up_scales(marks.ids) if marks.entries and not old.entries else marks.ids)
        old.fixed[0] = old.fixed[0] and marks.fixed[0]

    def _demote_entries(self, marks: TensorScales) -> None:
        """A copy of a parameter, and all views of it, are numbers like others from now on."""
        for tensor, each in [*self._known.values()]:
            if each.entries and has_same_storage(each.ids, marks.ids):
                self._store_tensor_scales(tensor, TensorScales(each.ids, False, each.fixed))
        every = torch.empty(0, dtype=torch.float64).set_(marks.ids.untyped_storage())
        every.copy_(self.entries.look_up_scales(every))

    def _store_tensor_scales(self, tensor: Tensor, marks: TensorScales) -> None:
        self._known[id(tensor)] = tensor, marks

    def get_tensor_scales(self, value: Any) -> TensorScales:
        """What is known of a tensor; of one that was never seen, what its values say."""
        if not isinstance(value, Tensor):
            return make_constant_scales(torch.as_tensor(value, dtype=torch.float64))
        known = self._known.get(id(value))
        if known is None:
            self._store_tensor_scales(value, make_constant_scales(value))
            known = self._known[id(value)]
        return known[1]

    def pin(self, name: str, arrays: list[Tensor], known: bool) -> None:
        pinned = sum([self.scales.pin(ids) for ids in arrays])
        if pinned or not known:
            at = self.find_location()
            key = name, at.module, at.line
            already = self.obstacles[key].pinned if key in self.obstacles else 0
            operation = name.replace("::", ".") if "::" in name else f"aten.{name}"
            self.obstacles[key] = Obstacle(operation, at.module, at.line, known, pinned + already)

    def find_location(self) -> CodeLocation:
        return find_code_location(self.names)


def _get_shape(value: Any) -> torch.Size | None:
    value = value.ids if isinstance(value, TensorScales) else value
    return value.shape if isinstance(value, Tensor) else None


def replay_on_ids(call: OperationCall, indices: Any = ()) -> Any:
    """The same operation, done to the numbers instead of the values; ``indices`` say where and stay as they are."""
    where = {id(leaf) for leaf in tree_flatten(indices)[0]}
    leaves = tree_flatten((call.args, call.kwargs))[0]
    seen = [call.watch.get_tensor_scales(leaf) for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in where]
    entries = bool(seen) and all(m.entries for m in seen)
    for marks in seen:
        if marks.entries and not entries:
            # A class token beside others is a number like theirs.
            call.entries.record_addition(marks.ids, call.entries.look_up_scales(marks.ids))

    def replace_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in where:
            return leaf.cpu()
        return call.watch.get_tensor_scales(leaf).ids if entries else call.get_scale_ids(leaf)

    args, kwargs = tree_map(replace_leaf, (call.args, call.kwargs))
    found: list[TensorScales | None] = []
    for ids in tree_flatten(call.func(*args, **kwargs))[0]:
        # Views of one constant or of one array share whether it still is constant.
        shared = len(seen) == 1 and isinstance(ids, Tensor) and has_same_storage(ids, seen[0].ids)
        fixed = seen[0].fixed if shared else [all(m.fixed[0] for m in seen)]
        found.append(TensorScales(ids, entries, fixed) if isinstance(ids, Tensor) else None)
    return found


LIBRARY = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision


class CodeLocation(NamedTuple):
    """The innermost module of the model, and the innermost line of code that is not torch's."""

    module: str
    line: str


def find_code_location(names: Mapping[int, str]) -> CodeLocation:
    """Where the forward pass of a model with these modules is just now."""
    frame: FrameType | None = sys._getframe(1)
    module, line = None, ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(LIBRARY) and module is not None:
            break  # whoever called the model
        owner = frame.f_locals.get("self")
        if module is None and isinstance(owner, nn.Module):
            module = names.get(id(owner))
        if not line and not file.startswith((LIBRARY, TORCH, "<frozen")):
            text = linecache.getline(file, frame.f_lineno).strip()
            line = f"{Path(file).name}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back
    return CodeLocation(module or "", line)
