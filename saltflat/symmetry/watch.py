"""Watching a forward pass: every operation is done as always, and what it does to scales is written down.

Operations are seen where torch itself hands them to its kernels. There every model looks alike: attention is matrix
products and a softmax, whoever wrote it, and a forward pass may take any path that does not depend on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from saltflat.errors import ModelError, SaltflatError, first_line
from saltflat.symmetry.entries import Entries
from saltflat.symmetry.marks import NOWHERE, Marks, by_value, laid_out, memory_of, same_memory
from saltflat.symmetry.place import Place, place
from saltflat.symmetry.scales import ANY, GROUND, Scales


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


class Call:
    """One operation that was done, as its rule sees it."""

    def __init__(self, watch: Watch, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any):
        self.watch, self.name, self.func, self.args, self.kwargs, self.out = watch, name, func, args, kwargs, out
        self.scales, self.entries = watch.scales, watch.entries

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def ids(self, value: Any) -> Tensor:
        """The scales of a tensor or number."""
        marks = self.watch.marks(value)
        return self.entries.read(marks.ids) if marks.entries else marks.ids

    def raw(self, value: Any) -> Tensor | None:
        """The numbers of the parameter entries that a tensor holds, if it does."""
        if not isinstance(value, Tensor):
            return None
        marks = self.watch.marks(value)
        return marks.ids if marks.entries else None

    def fixed(self, value: Any) -> bool:
        """Whether a value depends on constants only."""
        return not isinstance(value, Tensor) or self.watch.marks(value).fixed[0]

    def ground(self, like: Any = None) -> Tensor:
        """Fixed scales for an array of this one's shape, or of the result's."""
        like = self.out if like is None else like
        return torch.full(like.shape, GROUND, dtype=torch.float64)

    def pin(self, *values: Any, known: bool = True) -> None:
        self.watch.pin(self.name, [self.ids(value) for value in values], known)


Rule = Callable[[Call], Any]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register what operations of these names do to scales; one with ``_`` behind its name does it in place.

    A rule gives an array of scales for the result, :class:`Marks`, or one of them for each tensor of several results.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def is_view(name: str) -> bool:
    """Whether an operation only moves numbers about, so that its result may be a part of what it is given."""
    return getattr(RULES.get(name), "moves", False)


class Watch(TorchDispatchMode):
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
        self.scales = Scales()
        self.entries = Entries(self.scales, members)
        self.names = names
        self._operations = iter(operations)
        self.obstacles: dict[tuple[str, str, str], Obstacle] = {}
        self.epsilons: dict[int, float] = {}  # by the number of a variance's first entry
        # The tensors are kept, so that no other takes the place of one that is gone.
        self._known: dict[int, tuple[Tensor, Marks]] = {}
        # Where the values of masks, token numbers and what is computed from them alone are stored.
        self._plain: set[int] = set()
        self.assumed: dict[str, None] = {}
        for name, value in members.items():
            self._know(value, Marks(laid_out(self.entries.numbers(name, value), value), True, [False]))
        for leaf in tree_flatten(inputs)[0]:
            if isinstance(leaf, Tensor):
                ground = torch.full(leaf.shape, GROUND, dtype=torch.float64)
                self._know(leaf, Marks(laid_out(ground, leaf), False, [False]))
                if not leaf.is_floating_point() and not leaf.is_complex():
                    self._plain.add(memory_of(leaf))
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
            self._follow(func, args, kwargs, out)
        except SaltflatError:
            raise
        except Exception as error:
            at = self.place()
            raise ModelError(
                f"Got the operation {func} ({at.line or at.module or 'in the model itself'}), which cannot be followed "
                f"({first_line(error)}). Want a forward pass of ordinary tensor operations. "
                "Do: leave this operation out of the model, or take the part of the model without it."
            ) from error
        return out

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
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
        call = Call(self, name, func, args, kwargs, out)
        plain = self._gives_plain(call)
        for tensor, marks in zip(tree_flatten(out)[0], self._found(call), strict=True):
            if isinstance(tensor, Tensor):
                self._settle(tensor, marks, schema.is_mutable, is_view(name))
                (self._plain.add if plain else self._plain.discard)(memory_of(tensor))
                self._plain.discard(NOWHERE)

    def _gives_plain(self, call: Call) -> bool:
        """Whether the result depends on nothing but constants and the inputs that are whole numbers or masks."""
        if torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()):
            return False
        leaves = tree_flatten((call.args, call.kwargs))[0]
        return all(self.is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    def is_plain(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self._plain or self.marks(tensor).fixed[0]

    def assume(self) -> None:
        """Remember the line that decides by a value how the forward pass goes on."""
        at = self.place()
        self.assumed[at.line or at.module] = None

    def _found(self, call: Call) -> list[Any]:
        """What is known of each result."""
        tensors = [leaf for leaf in tree_flatten((call.args, call.kwargs))[0] if isinstance(leaf, Tensor)]
        outs = tree_flatten(call.out)[0]
        if torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ()) and call.name not in RULES:
            # Random numbers are others the next time: like inputs, not like constants.
            self.pin(call.name, [call.ids(tensor) for tensor in tensors], known=True)
            return [call.ground(out) if isinstance(out, Tensor) else None for out in outs]
        # Of views of constants, what is written to one is written to all.
        if all(self.marks(tensor).fixed[0] for tensor in tensors) and not (tensors and is_view(call.name)):
            return [by_value(out) for out in outs]
        if call.name in RULES:
            try:
                found = RULES[call.name](call)
                found = list(found) if isinstance(found, list | tuple) else [found]
                if [_shape(each) for each in found] == [_shape(out) for out in outs]:
                    return found
            except SaltflatError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                # Called in a way that the rule does not know: as if there were none.
                pass
        self.pin(call.name, [call.ids(tensor) for tensor in tensors], known=False)
        return [call.ground(out) if isinstance(out, Tensor) else None for out in outs]

    def _settle(self, tensor: Tensor, found: Any, written: bool, view: bool) -> None:
        marks = found if isinstance(found, Marks) else Marks(found, False, [False])
        if not view:
            # An array of its own: what is written to the result is not written to what it was made of.
            marks = Marks(laid_out(marks.ids, tensor), marks.entries, [marks.fixed[0]])
        before = self._known.get(id(tensor))
        if not written or before is None or before[1].ids.shape != tensor.shape:
            self._know(tensor, marks)
            return
        # In place: what is a view of the same memory sees it too.
        old = before[1]
        if old.entries and not marks.entries and bool((marks.ids != ANY).any()):
            self._open(old)
            old = self._known[id(tensor)][1]
        old.ids.copy_(self.entries.read(marks.ids) if marks.entries and not old.entries else marks.ids)
        old.fixed[0] = old.fixed[0] and marks.fixed[0]

    def _open(self, marks: Marks) -> None:
        """A copy of a parameter, and all views of it, are numbers like others from now on."""
        for tensor, each in [*self._known.values()]:
            if each.entries and same_memory(each.ids, marks.ids):
                self._know(tensor, Marks(each.ids, False, each.fixed))
        every = torch.empty(0, dtype=torch.float64).set_(marks.ids.untyped_storage())
        every.copy_(self.entries.read(every))

    def _know(self, tensor: Tensor, marks: Marks) -> None:
        self._known[id(tensor)] = tensor, marks

    def marks(self, value: Any) -> Marks:
        """What is known of a tensor; of one that was never seen, what its values say."""
        if not isinstance(value, Tensor):
            return by_value(torch.as_tensor(value, dtype=torch.float64))
        known = self._known.get(id(value))
        if known is None:
            self._know(value, by_value(value))
            known = self._known[id(value)]
        return known[1]

    def pin(self, name: str, arrays: list[Tensor], known: bool) -> None:
        pinned = sum([self.scales.pin(ids) for ids in arrays])
        if pinned or not known:
            at = self.place()
            key = name, at.module, at.line
            already = self.obstacles[key].pinned if key in self.obstacles else 0
            operation = name.replace("::", ".") if "::" in name else f"aten.{name}"
            self.obstacles[key] = Obstacle(operation, at.module, at.line, known, pinned + already)

    def place(self) -> Place:
        return place(self.names)


def _shape(value: Any) -> torch.Size | None:
    value = value.ids if isinstance(value, Marks) else value
    return value.shape if isinstance(value, Tensor) else None


def mirrored(call: Call, indices: Any = ()) -> Any:
    """The same operation, done to the numbers instead of the values; ``indices`` say where and stay as they are."""
    where = {id(leaf) for leaf in tree_flatten(indices)[0]}
    leaves = tree_flatten((call.args, call.kwargs))[0]
    seen = [call.watch.marks(leaf) for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in where]
    entries = bool(seen) and all(m.entries for m in seen)
    for marks in seen:
        if marks.entries and not entries:
            # A class token beside others is a number like theirs.
            call.entries.note_added(marks.ids, call.entries.read(marks.ids))

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in where:
            return leaf.cpu()
        return call.watch.marks(leaf).ids if entries else call.ids(leaf)

    args, kwargs = tree_map(one, (call.args, call.kwargs))
    found: list[Marks | None] = []
    for ids in tree_flatten(call.func(*args, **kwargs))[0]:
        # Views of one constant or of one array share whether it still is constant.
        shared = len(seen) == 1 and isinstance(ids, Tensor) and same_memory(ids, seen[0].ids)
        fixed = seen[0].fixed if shared else [all(m.fixed[0] for m in seen)]
        found.append(Marks(ids, entries, fixed) if isinstance(ids, Tensor) else None)
    return found
