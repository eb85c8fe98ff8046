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

from saltflat.errors import DataError, format_error_line
from saltflat.symmetry.running import find_tensors, parse_example
from saltflat.symmetry.same import compute_relative_difference, compute_tolerance, copy_model
from saltflat.symmetry.uses import (
    BatchNormUses,
    find_norms_and_layers,
    get_output_dimensions,
    get_tensors,
    is_batch_norm,
    select_foldable,
)


def observe_uses(model: nn.Module, example: Any) -> BatchNormUses:
    """The uses that are seen while the model runs on an example; in float64, if its code allows that."""
    inputs = parse_example(example)
    for wide in (True, False):
        try:
            return _observe_uses_once(model, inputs, wide)
        except Exception as error:
            failure = error
    raise DataError(
        f"Got an error from the model on this example ({format_error_line(failure)}). "
        f"Want an example that {type(model).__name__} accepts. "
        "Do: pass inputs of the right shape and kind, with the axis of examples; several inputs as a tuple."
    ) from failure


def _observe_uses_once(model: nn.Module, inputs: Any, wide: bool) -> BatchNormUses:
    probe = _copy_without_grad(model, wide)
    watch = _StorageReadRecorder(find_norms_and_layers(probe))
    with watch:
        result = _run_model(probe, inputs, wide)
    watch.filter_sources()
    before = _find_float_outputs(result)

    def is_same_output(one: Tensor, two: Tensor) -> bool:
        # Code that works in shorter numbers for a while rounds the two models differently.
        finite = one.isfinite()
        same_kind = torch.equal(finite, two.isfinite())
        return same_kind and compute_relative_difference(one[finite], two[finite]) <= compute_tolerance(watch.precision)

    def is_kept_by(folded: nn.Module) -> bool:
        try:
            after = _find_float_outputs(_run_model(_copy_without_grad(folded, wide), inputs, wide))
        except Exception:
            return False
        return len(before) == len(after) and all(map(is_same_output, before, after))

    return BatchNormUses(
        select_foldable(watch.sources, find_norms_and_layers(model), watch.read), watch.read, is_kept_by
    )


def _copy_without_grad(model: nn.Module, wide: bool) -> nn.Module:
    """Without gradients: a graph for the backward pass would hold on to the results of layers."""
    new = copy_model(model).requires_grad_(False)
    return new.double() if wide else new


def _run_model(model: nn.Module, inputs: Any, wide: bool) -> Any:
    def convert_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().clone()
        return leaf.double() if wide and leaf.is_floating_point() else leaf

    args, kwargs = tree_map(convert_leaf, inputs)
    torch.manual_seed(0)  # for models that draw random numbers
    return model(*args, **kwargs)


def _find_float_outputs(result: Any) -> list[Tensor]:
    return [tensor for tensor in find_tensors(result) if tensor.is_floating_point()]


class _StorageReadRecorder(TorchDispatchMode):
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
            for tensor in get_tensors(module):
                if (memory := _get_storage_ref(tensor)) is not None:
                    self._owners[memory].add(name)
            module.register_forward_pre_hook(self._make_pre_hook(name), with_kwargs=True)
            module.register_forward_hook(self._make_post_hook(name))

    def _make_pre_hook(self, name: str) -> Any:
        norm = is_batch_norm(self._parts[name])

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(name)
            self._calls[name] += 1
            given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            memory = _get_storage_ref(given)
            source = self._made.get(memory) if norm and memory is not None else None
            if source is None or given is None:
                return
            if source in self.sources.values():
                self._shared.add(source)
            elif given.dim() == get_output_dimensions(self._parts[source]):
                self.sources[name] = source

        return hook

    def _make_post_hook(self, name: str) -> Any:
        norm = is_batch_norm(self._parts[name])

        def hook(module: nn.Module, args: Any, result: Tensor) -> None:
            self._running.pop()
            if not norm and (memory := _get_storage_ref(result)) is not None:
                self._made[memory] = name

        return hook

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if (memory := _get_storage_ref(leaf)) is not None:
                self._record_read(memory)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.precision = max(self.precision, torch.finfo(leaf.dtype).eps)
        return out

    def _record_read(self, memory: StorageWeakRef) -> None:
        owners = self._owners.get(memory, set())
        if not owners & set(self._running):
            self.read |= owners
        source = self._made.get(memory)
        if source is not None and not (self._running and self.sources.get(self._running[-1]) == source):
            self._shared.add(source)

    def filter_sources(self) -> None:
        """Leave only layers that were called once and whose result has gone into a BatchNorm and nowhere else."""
        self._shared |= {name for memory, name in self._made.items() if not memory.expired()}
        self.sources = {
            norm: layer
            for norm, layer in self.sources.items()
            if self._calls[norm] == self._calls[layer] == 1 and layer not in self._shared
        }


def _get_storage_ref(value: Any) -> StorageWeakRef | None:
    """Where a tensor is kept; None for what has no memory of its own (sparse tensors, tensors inside of vmap)."""
    try:
        return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else None
    except NotImplementedError:
        return None
