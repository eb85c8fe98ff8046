"""Which BatchNorm receives the output of a layer: from the model's code, or from a forward pass."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.fx
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.errors import DataError, ModelError, format_error_line
from saltflat.symmetry.equality import compute_relative_difference, compute_tolerance, copy_model
from saltflat.symmetry.tracing.run import find_tensors, parse_example
from saltflat.symmetry.tracing.trace import LIBRARY, TORCH

Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed
Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@dataclass(frozen=True)
class BatchNormUses:
    """What was found, with layers and BatchNorms by their names.

    Attributes:
        sources: of a BatchNorm, the layer whose result it is given and nothing else is.
        read: those whose numbers other code than their own reads.
        kept_by: whether a folded copy does the same.
    """

    sources: Mapping[str, str]
    read: set[str]
    kept_by: Callable[[nn.Module], bool]


def find_norms_and_layers(model: nn.Module) -> dict[str, nn.Module]:
    """BatchNorms, and layers that one can be folded into."""
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)

    def is_foldable_layer(module: nn.Module) -> bool:
        # A parameter that another module holds too would have to change there as well.
        shared = any(p is not None and held[id(p)] > 1 for p in module._parameters.values())
        return _is_unmodified(module, Layer) and not _has_hooks(module) and not shared

    return {
        name: module for name, module in model.named_modules() if is_batch_norm(module) or is_foldable_layer(module)
    }


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm with running statistics."""
    statistics = (module._buffers.get(name) for name in ("running_mean", "running_var"))
    return _is_unmodified(module, Norm) and all(each is not None for each in statistics)


def get_output_dimensions(layer: Any) -> int:
    """Of what a layer returns when its units are along axis 1."""
    return 2 if isinstance(layer, nn.Linear) else 2 + len(layer.kernel_size)


def _can_fold(layer: Any, norm: Any) -> bool:
    """Whether the channels of the BatchNorm are the units of the layer."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[get_output_dimensions(layer)]
    units = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return isinstance(norm, kind | nn.SyncBatchNorm) and units == norm.num_features and not _has_hooks(norm)


def _is_unmodified(module: nn.Module, kinds: Any) -> bool:
    """Whether a module computes what its type does, from parameters of its own."""
    kind = next((kind for kind in kinds.__args__ if isinstance(module, kind)), None)
    methods = ("forward", "_conv_forward", "_check_input_dim")
    return (
        kind is not None
        and all(getattr(type(module), name, None) is getattr(kind, name, None) for name in methods)
        and "forward" not in vars(module)
        and set(module._parameters) == {"weight", "bias"}
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def get_tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in [*module._parameters.values(), *module._buffers.values()] if t is not None]


def trace_uses(model: nn.Module) -> BatchNormUses:
    """The uses that ``torch.fx`` finds in the code."""
    if is_batch_norm(model):  # all there is; torch.fx would look inside
        return BatchNormUses({}, set(), lambda folded: True)
    parts = find_norms_and_layers(model)
    graph, read = _trace_graph(model, parts)
    modules = dict(model.named_modules())
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")

    def find_source(node: torch.fx.Node) -> str | None:
        """The module that made what this one is given, if that is all it was made for."""
        given = node.all_input_nodes[0]
        if given.op != "call_module" or len(given.users) > 1:
            return None
        module = modules[str(given.target)]
        passed_on = isinstance(module, nn.Identity | _DropoutNd) and not _has_hooks(module)
        return find_source(given) if passed_on else str(given.target)

    sources = {}
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "call_module" and name in parts and is_batch_norm(parts[name]):
            source = find_source(node)
            if source in parts and not is_batch_norm(parts[source]) and calls[name] == calls[source] == 1:
                sources[name] = source

    def is_kept_by(folded: nn.Module) -> bool:
        try:
            return _list_steps(_trace_graph(folded, parts)[0]) == _list_steps(graph)
        except ModelError:
            return False

    return BatchNormUses(select_foldable(sources, parts, read), read, is_kept_by)


def select_foldable(sources: Mapping[str, str], parts: Mapping[str, nn.Module], read: set[str]) -> dict[str, str]:
    return {
        norm: layer for norm, layer in sources.items() if layer not in read and _can_fold(parts[layer], parts[norm])
    }


def _trace_graph(model: nn.Module, parts: Iterable[str]) -> tuple[torch.fx.Graph, set[str]]:
    """The steps of the forward pass, and those parts whose numbers other code reads."""
    model = copy_model(model)  # because a forward pass may leave something behind
    modules = {name: model.get_submodule(name) for name in parts}
    tracer = _BatchNormTracer(set(modules.values()))
    try:
        graph = tracer.trace(model)
    except Exception as error:
        reason = format_error_line(error).split(". ")[0]
        raise ModelError(
            "Expected to know what each BatchNorm is given, but got a model that torch.fx cannot follow, "
            f"{_format_error_line(error)} ({reason}). Try passing an example input: fold(model, example)."
        ) from error
    return graph, {name for name, module in modules.items() if {id(t) for t in get_tensors(module)} & tracer.read}


class _BatchNormTracer(torch.fx.Tracer):
    """Follows the forward pass down to layers and BatchNorms; what has none inside is one step."""

    def __init__(self, parts: set[nn.Module]) -> None:
        super().__init__()
        self.parts = parts
        self.read: set[int] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = m in self.parts or super().is_leaf_module(m, module_qualified_name)
        return known or not any(inner in self.parts for inner in m.modules())

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # Layers and BatchNorms are not entered, so whoever asks for their tensors is someone else.
        if isinstance(attr_val, Tensor):
            self.read.add(id(attr_val))
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _list_steps(graph: torch.fx.Graph) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.nodes]


def _format_error_line(error: BaseException) -> str:
    """The innermost line of the user's code that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((LIBRARY, TORCH, "<"))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}" if own else "from its first step on"


def observe_uses(model: nn.Module, example: Any) -> BatchNormUses:
    """The uses that are seen while the model runs on an example; in float64, if its code allows that."""
    inputs = parse_example(example)
    for wide in (True, False):
        try:
            return _observe_uses_once(model, inputs, wide)
        except Exception as error:
            failure = error
    raise DataError(
        f"Expected an example that {type(model).__name__} accepts, but got an error from the model on this example "
        f"({format_error_line(failure)}). Try passing inputs of the right shape and kind, with the axis of examples; "
        "several inputs as a tuple."
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
