"""Which BatchNorm is given what a layer returns, as one forward pass shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.errors import DataError, first_line
from saltflat.symmetry.running import inputs_of, tensors_in
from saltflat.symmetry.same import copied, difference, tolerance_at
from saltflat.symmetry.uses import Uses, dimensions, foldable, is_norm, parts_of, tensors_of


def watched(model: nn.Module, example: Any) -> Uses:
    """The uses that are seen while the model runs on an example; in float64, if its code allows that."""
    inputs = inputs_of(example)
    for wide in (True, False):
        try:
            return _watched(model, inputs, wide)
        except Exception as error:
            failure = error
    raise DataError(
        f"Got an error from the model on this example ({first_line(failure)}). "
        f"Want an example that {type(model).__name__} accepts. "
        "Do: pass inputs of the right shape and kind, with the axis of examples; several inputs as a tuple."
    ) from failure


def _watched(model: nn.Module, inputs: Any, wide: bool) -> Uses:
    probe = _copy(model, wide)
    watch = _Watch(parts_of(probe))
    with watch:
        result = _run(probe, inputs, wide)
    watch.finish()
    before = _outputs(result)

    def same(one: Tensor, two: Tensor) -> bool:
        # Code that works in shorter numbers for a while rounds the two models differently.
        finite = one.isfinite()
        same_kind = torch.equal(finite, two.isfinite())
        return same_kind and difference(one[finite], two[finite]) <= tolerance_at(watch.precision)

    def kept_by(folded: nn.Module) -> bool:
        try:
            after = _outputs(_run(_copy(folded, wide), inputs, wide))
        except Exception:
            return False
        return len(before) == len(after) and all(map(same, before, after))

    return Uses(foldable(watch.sources, parts_of(model), watch.read), watch.read, kept_by)


def _copy(model: nn.Module, wide: bool) -> nn.Module:
    """Without gradients: a graph for the backward pass would hold on to the results of layers."""
    new = copied(model).requires_grad_(False)
    return new.double() if wide else new


def _run(model: nn.Module, inputs: Any, wide: bool) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().clone()
        return leaf.double() if wide and leaf.is_floating_point() else leaf

    args, kwargs = tree_map(one, inputs)
    torch.manual_seed(0)  # for models that draw random numbers
    return model(*args, **kwargs)


def _outputs(result: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]


class _Watch(TorchDispatchMode):
    """While it is entered, which memory each operation reads.

    Attributes:
        sources: of each BatchNorm, the layer whose result it was given.
        read: the parts whose numbers were read by others.
        precision: that of the shortest numbers that occurred.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[str, str] = {}
        self.read: set[str] = set()
        self.precision = 0.0
        self._parts = parts
        self._running: list[str] = []
        self._calls: Counter[str] = Counter()
        self._shared: set[str] = set()
        # Memory by weak references: they tell what still lives, and no other memory takes the name of what does not.
        self._made: dict[StorageWeakRef, str] = {}
        self._owners: dict[StorageWeakRef, set[str]] = defaultdict(set)
        for name, module in parts.items():
            for tensor in tensors_of(module):
                if (memory := _memory(tensor)) is not None:
                    self._owners[memory].add(name)
            module.register_forward_pre_hook(self._entered(name), with_kwargs=True)
            module.register_forward_hook(self._left(name))

    def _entered(self, name: str) -> Any:
        norm = is_norm(self._parts[name])

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(name)
            self._calls[name] += 1
            given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            memory = _memory(given)
            source = self._made.get(memory) if norm and memory is not None else None
            if source is None or given is None:
                return
            if source in self.sources.values():
                self._shared.add(source)
            elif given.dim() == dimensions(self._parts[source]):
                self.sources[name] = source

        return hook

    def _left(self, name: str) -> Any:
        norm = is_norm(self._parts[name])

        def hook(module: nn.Module, args: Any, result: Tensor) -> None:
            self._running.pop()
            if not norm and (memory := _memory(result)) is not None:
                self._made[memory] = name

        return hook

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if (memory := _memory(leaf)) is not None:
                self._used(memory)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.precision = max(self.precision, torch.finfo(leaf.dtype).eps)
        return out

    def _used(self, memory: StorageWeakRef) -> None:
        owners = self._owners.get(memory, set())
        if not owners & set(self._running):
            self.read |= owners
        source = self._made.get(memory)
        if source is not None and not (self._running and self.sources.get(self._running[-1]) == source):
            self._shared.add(source)

    def finish(self) -> None:
        """Leave only layers that were called once and whose result has gone into a BatchNorm and nowhere else."""
        self._shared |= {name for memory, name in self._made.items() if not memory.expired()}
        self.sources = {
            norm: layer
            for norm, layer in self.sources.items()
            if self._calls[norm] == self._calls[layer] == 1 and layer not in self._shared
        }


def _memory(value: Any) -> StorageWeakRef | None:
    """Where a tensor is kept; None for what has no memory of its own (sparse tensors, tensors inside of vmap)."""
    try:
        return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else None
    except NotImplementedError:
        return None
