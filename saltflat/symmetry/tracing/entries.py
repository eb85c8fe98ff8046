"""Which units the entries of parameters connect, and which operations the outputs depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saltflat.layers import IN, OUT
from saltflat.symmetry.tracing.scales import (
    ANY,
    GROUND,
    NO_STORAGE,
    SHIFT,
    ScaleSystem,
    equate_factors,
    evaluate_forms,
    get_storage_address,
    select_independent_entries,
)


@dataclass(frozen=True, eq=False)
class EntryUse:
    """An operation that multiplies or adds entries of a parameter.

    Attributes:
        numbers: the numbers of the entries, in the layout in which the operation uses them.
        roles: what each axis of ``numbers`` counts: see :mod:`saltflat.layers`.
        scales: for additions, the scales of the other operand at the same positions; the roles follow from them.
    """

    numbers: Tensor
    roles: tuple[str, ...] = ()
    scales: Tensor | None = None


class ParameterEntries:
    """The scales at both ends of every parameter entry; entries are numbered from 1.

    An entry is multiplied by the scale of its ``head`` and divided by that of its ``tail``. A large weight has many
    entries and few units, so entries have no variables of their own.
    """

    def __init__(self, scales: ScaleSystem, members: Mapping[str, Tensor]) -> None:
        self.scales = scales
        self.first: dict[str, int] = {}
        total = 1
        for name, value in members.items():
            self.first[name] = total
            total += value.numel()
        # ANY until an operation uses the entry.
        self.head = torch.zeros(total, dtype=torch.int64)
        self.tail = torch.zeros(total, dtype=torch.int64)
        self.uses: dict[tuple[Any, ...], EntryUse] = {}
        # Entries that no operation has used; set after the pass.
        self.idle = torch.ones(total, dtype=torch.bool)

    def record_use(self, numbers: Tensor, roles: Sequence[str]) -> None:
        """Record the role of each axis of these entries in an operation."""
        if numbers.numel():
            # A weight that is used repeatedly is recorded once.
            key = numbers.data_ptr(), numbers.shape, numbers.stride(), tuple(roles)
            self.uses[key] = EntryUse(numbers, tuple(roles))

    def record_addition(self, numbers: Tensor, ids: Tensor) -> None:
        """Record that these entries were added to, or concatenated with, numbers of the scales ``ids``."""
        if numbers.numel() and numbers.dim() > 1:
            wide = ids.expand(torch.broadcast_shapes(ids.shape, numbers.shape))
            key = numbers.data_ptr(), numbers.shape, numbers.stride()
            self.uses[key] = EntryUse(numbers, scales=wide[(0,) * (wide.dim() - numbers.dim())])

    def find_roles(self, use: EntryUse) -> tuple[str, ...]:
        """Return the role of each axis of a use; call this after the pass.

        Added entries are like rows of an embedding table: axes along which scales vary count outputs, all others
        inputs.
        """
        if use.scales is None:
            return use.roles
        wide = [axis for axis, size in enumerate(use.numbers.shape) if size > 1]
        sizes = torch.from_numpy(evaluate_forms(self.scales.system, self.scales.forms, use.scales.long().numpy()))
        # Without free scales the units may still be known; if nothing distinguishes them, features are the last axis.
        known = _find_varying_axes(use.scales, wide)
        units = _find_varying_axes(sizes, wide) or (known if len(known) == 1 else wide[-1:])
        return tuple(OUT if axis in units else IN for axis in range(use.numbers.dim()))

    def get_numbers(self, name: str, value: Tensor) -> Tensor:
        """Return the numbers of the entries of a parameter, in its shape."""
        first = self.first[name]
        return torch.arange(first, first + value.numel(), dtype=torch.float64).reshape(value.shape)

    def has_used_entries(self, numbers: Tensor) -> bool:
        """Return whether an operation has already used any of these entries."""
        return bool((self.head[numbers.long()] != ANY).any())

    def assign_scales(self, numbers: Tensor, head: Tensor, tail: Tensor | int = GROUND) -> None:
        """Record that these entries lead from units of the scales ``tail`` to units of the scales ``head``."""
        tails = tail if isinstance(tail, Tensor) else torch.full((), tail, dtype=torch.float64)
        shape = torch.broadcast_shapes(numbers.shape, head.shape, tails.shape)
        if shape == numbers.shape and self._assign_whole_parameter(
            numbers, head.long(), tails.long().clamp_min(GROUND)
        ):
            return
        N, H, T = (part.expand(shape).reshape(-1).long() for part in (numbers, head, tails))
        real = (N > 0) & (H != ANY)
        N, H, T = N[real], H[real], T[real].clamp_min(GROUND)
        new = self.head[N] == ANY
        self.head[N[new]], self.tail[N[new]] = H[new], T[new]
        other = (self.head[N] != H) | (self.tail[N] != T)
        if bool(other.any()):
            N, H, T = N[other], H[other], T[other]
            quads = torch.stack([self.head[N], self.tail[N], H, T], 1)
            equate_factors(self.scales.system, self.scales.forms, quads.numpy())

    def _assign_whole_parameter(self, numbers: Tensor, head: Tensor, tail: Tensor) -> bool:
        """Assign scales to all entries of a parameter at once, if none or all of them are in use.

        Returns False if this does not apply. It nearly always does for large weights, and needs few arrays of their
        size.
        """
        views = self._get_head_tail_views(numbers)
        if views is None or bool((head == ANY).any()):
            return False
        old_head, old_tail = views
        used = old_head != ANY
        if bool(used.all()):
            heads, tails = head.expand(numbers.shape), tail.expand(numbers.shape)
            quads = select_independent_entries(*(each.numpy() for each in (old_head, old_tail, heads, tails)))
            equate_factors(self.scales.system, self.scales.forms, quads)
            return True
        if bool(used.any()):
            return False
        old_head.copy_(head.expand(numbers.shape))
        old_tail.copy_(tail.expand(numbers.shape))
        return True

    def _get_head_tail_views(self, numbers: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return views of heads and tails, or None unless the numbers are consecutive up to a permutation of axes."""
        if not numbers.numel():
            return None
        axes = range(numbers.dim())
        first = int(numbers[(0,) * numbers.dim()])
        ends = [int(numbers.select(axis, -1)[(0,) * (numbers.dim() - 1)]) for axis in axes]
        order = sorted(axes, key=lambda axis: -ends[axis])
        back = sorted(axes, key=lambda axis: order[axis])
        span = slice(first, first + numbers.numel())

        def reshape_like_numbers(each: Tensor) -> Tensor:
            return each.reshape([numbers.shape[axis] for axis in order]).permute(back)

        if first < 1 or not torch.equal(
            numbers, reshape_like_numbers(torch.arange(span.start, span.stop, dtype=numbers.dtype))
        ):
            return None
        return reshape_like_numbers(self.head[span]), reshape_like_numbers(self.tail[span])

    def look_up_scales(self, numbers: Tensor) -> Tensor:
        """Return the scales of these entries; an unused entry gets a new variable."""
        N = numbers.long()
        different = N[(N > 0) & (self.head[N] == ANY)].unique()
        self.head[different] = self.scales.add_variables(len(different)).long()
        self.tail[different] = GROUND
        pairs = self.head[N] * SHIFT + self.tail[N]
        keys, places = pairs.unique(return_inverse=True)
        head, tail = (keys // SHIFT).double(), (keys % SHIFT).double()
        return self.scales.add(head, tail, -1)[places]


def _find_varying_axes(values: Tensor, axes: Sequence[int]) -> list[int]:
    return [axis for axis in axes if bool(((values - values.narrow(axis, 0, 1)).abs() > 1e-9).any())]


class OperationRecorder(TorchDispatchMode):
    """Records the name of every operation and the memory it reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._read: list[set[int]] = []
        self._written: list[set[int]] = []
        # References keep memory addresses from being reused.
        self._tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self._read.append(self._collect_storage(tree_leaves((args, kwargs))))
        self._written.append(self._collect_storage(tree_leaves(out)))
        return out

    def _collect_storage(self, leaves: Iterable[Any]) -> set[int]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._tensors += tensors
        return set(map(get_storage_address, tensors))

    def find_live(self, outputs: Sequence[Tensor]) -> list[bool]:
        """Return for each operation whether the outputs depend on the memory it writes.

        Operations that return no tensor count as live: their results may control the forward pass.
        """
        needed = {NO_STORAGE, *map(get_storage_address, outputs)}
        found = []
        for read, written in zip(reversed(self._read), reversed(self._written), strict=True):
            reaches = not written or not needed.isdisjoint(written)
            needed |= read if reaches else set()
            found.append(reaches)
        return found[::-1]


class DeadOperationPerturber(TorchDispatchMode):
    """Perturbs the results of operations that the outputs supposedly do not depend on."""

    def __init__(self, operations: Sequence[tuple[str, bool]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = iter(operations)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name, reaches = next(self._operations, ("", True))
        if name == str(func) and not reaches:
            given = {get_storage_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for leaf in tree_leaves(out):
                # Views share the memory of parameters, which must not change.
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_floating_point()
                    and get_storage_address(leaf) not in {NO_STORAGE, *given}
                ):
                    leaf.mul_(1.5).add_(0.1)
        return out


def find_live_operations(
    prepare: Callable[[], Callable[[], Any]], select_outputs: Callable[[Any], Sequence[Tensor]]
) -> list[tuple[str, bool]]:
    """Return, for each operation of a forward pass, its name and whether the outputs depend on it.

    If perturbing the seemingly unused results changes an output, values pass outside of torch (numpy, lists) and all
    operations count as live.

    Args:
        prepare: prepares a forward pass and returns a function that runs it.
        select_outputs: selects the output tensors to consider.

    Example:
        >>> x = torch.ones(2)
        >>> def forward():
        ...     x.exp()  # unused
        ...     return x.neg()
        >>> find_live_operations(lambda: forward, lambda out: [out])
        [('aten.exp.default', False), ('aten.neg.default', True)]
    """
    forward, recording = prepare(), OperationRecorder()
    with torch.random.fork_rng(devices=[]), recording:
        outputs = select_outputs(forward())
    found = list(zip(recording.names, recording.find_live(outputs), strict=True))
    if all(reaches for _, reaches in found):
        return found
    forward = prepare()
    with torch.random.fork_rng(devices=[]), DeadOperationPerturber(found):
        again = select_outputs(forward())
    same = len(outputs) == len(again) and all(map(_is_equal_or_nan, outputs, again))
    return found if same else [(name, True) for name, _ in found]


def _is_equal_or_nan(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool(((one == two) | (one.isnan() & two.isnan())).all())
