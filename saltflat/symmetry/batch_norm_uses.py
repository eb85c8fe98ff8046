"""Find the layer whose output each BatchNorm receives, from the model's code or from a forward pass."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

import torch.fx
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from saltflat.errors import DataError, ModelError, format_error_line
from saltflat.symmetry.equality import (
    Example,
    ModelInputs,
    ModelOutput,
    compute_relative_difference,
    compute_tolerance,
    copy_model,
    find_tensors,
    parse_example,
)
from saltflat.symmetry.tracing.trace import LIBRARY, TORCH

Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
FoldableLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed
BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm

T = TypeVar("T")


@dataclass(frozen=True)
class BatchNormUses:
    """How a model uses its layers and BatchNorms, by their names.

    Attributes:
        sources: for each BatchNorm that can be folded, the layer whose output goes only to it.
        read: layers and BatchNorms whose tensors are read by other code.
        is_preserved_by: returns whether a folded copy computes the same function.
    """

    sources: Mapping[str, str]
    read: set[str]
    is_preserved_by: Callable[[nn.Module], bool]


def find_norms_and_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return BatchNorms, and layers into which one can be folded, by name."""
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)

    def is_foldable_layer(module: nn.Module) -> bool:
        # A shared parameter would have to change in the other module, too.
        shared = any(p is not None and held[id(p)] > 1 for p in module._parameters.values())
        return _is_unmodified(module, get_args(FoldableLayer)) and not _has_hooks(module) and not shared

    return {
        name: module for name, module in model.named_modules() if is_batch_norm(module) or is_foldable_layer(module)
    }


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm with running statistics."""
    statistics = (module._buffers.get(name) for name in ("running_mean", "running_var"))
    return _is_unmodified(module, get_args(BatchNorm)) and all(each is not None for each in statistics)


def get_output_dimensions(layer: nn.Module) -> int:
    """Return the number of dimensions of a layer's output for which axis 1 counts its units."""
    assert isinstance(layer, FoldableLayer)
    return 2 if isinstance(layer, nn.Linear) else 2 + len(layer.kernel_size)


def _can_fold(layer: nn.Module, norm: nn.Module) -> bool:
    """Return whether the channels of the BatchNorm are the units of the layer."""
    assert isinstance(layer, FoldableLayer)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[get_output_dimensions(layer)]
    units = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return isinstance(norm, (kind, nn.SyncBatchNorm)) and units == norm.num_features and not _has_hooks(norm)


def _is_unmodified(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Return whether a module computes what torch's class does, from its own parameters."""
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
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
    """Return the parameters and buffers of a module itself."""
    return [t for t in [*module._parameters.values(), *module._buffers.values()] if t is not None]


def trace_uses(model: nn.Module) -> BatchNormUses:
    """Return the uses that ``torch.fx`` finds in the model's code."""
    if is_batch_norm(model):  # torch.fx would trace its internals
        return BatchNormUses({}, set(), lambda folded: True)
    parts = find_norms_and_layers(model)
    graph, read = _trace_graph(model, parts)
    modules = dict(model.named_modules())
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")

    def find_source(node: torch.fx.Node) -> str | None:
        """Return the module whose output this one receives, or None if others receive it, too."""
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

    def is_preserved_by(folded: nn.Module) -> bool:
        try:
            return _list_steps(_trace_graph(folded, parts)[0]) == _list_steps(graph)
        except ModelError:
            return False

    return BatchNormUses(select_foldable(sources, parts, read), read, is_preserved_by)


def select_foldable(sources: Mapping[str, str], parts: Mapping[str, nn.Module], read: set[str]) -> dict[str, str]:
    """Return the BatchNorms that can be folded, each with its layer."""
    return {
        norm: layer for norm, layer in sources.items() if layer not in read and _can_fold(parts[layer], parts[norm])
    }


def _trace_graph(model: nn.Module, parts: Iterable[str]) -> tuple[torch.fx.Graph, set[str]]:
    """Return the graph of the forward pass, and the parts whose tensors are read by other code."""
    model = copy_model(model)  # because a forward pass may change the model
    modules = {name: model.get_submodule(name) for name in parts}
    tracer = _BatchNormTracer(set(modules.values()))
    try:
        graph = tracer.trace(model)
    except Exception as error:
        reason = format_error_line(error).split(". ")[0]
        raise ModelError(
            f"Expected a model that torch.fx can trace, but got an error at {_format_error_line(error)} ({reason}). "
            "Try passing an example input: fold(model, example)."
        ) from error
    return graph, {name for name, module in modules.items() if {id(t) for t in get_tensors(module)} & tracer.read}


class _BatchNormTracer(torch.fx.Tracer):
    """Traces the forward pass down to layers and BatchNorms; modules without any are one step."""

    def __init__(self, parts: set[nn.Module]) -> None:
        super().__init__()
        self.parts = parts
        self.read: set[int] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one step of the graph."""
        known = m in self.parts or super().is_leaf_module(m, module_qualified_name)
        return known or not any(inner in self.parts for inner in m.modules())

    def getattr(self, attr: str, attr_val: T, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute of a module, and record tensors that are read."""
        # Layers and BatchNorms are leaves, so only other code reads their tensors here.
        if isinstance(attr_val, Tensor):
            self.read.add(id(attr_val))
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _list_steps(graph: torch.fx.Graph) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.nodes]


def _format_error_line(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((LIBRARY, TORCH, "<"))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}" if own else "its first step"


def observe_uses(model: nn.Module, example: Example) -> BatchNormUses:
    """Return the uses observed while the model runs on an example, in float64 if the model supports it."""
    inputs = parse_example(example)
    for wide in (True, False):
        try:
            return _observe_uses_once(model, inputs, wide)
        except Exception as error:
            failure = error
    raise DataError(
        f"Expected an example that {type(model).__name__} accepts, but got an error from the model on this example "
        f"({format_error_line(failure)}). Try passing inputs of the right shape and dtype, with a batch axis; "
        "several inputs as a tuple."
    ) from failure


def _observe_uses_once(model: nn.Module, inputs: ModelInputs, wide: bool) -> BatchNormUses:
    probe = _copy_without_grad(model, wide)
    recorder = _StorageReadRecorder(find_norms_and_layers(probe))
    with recorder:
        result = _run_model(probe, inputs, wide)
    recorder.filter_sources()
    before = _find_float_outputs(result)

    def is_same_output(one: Tensor, two: Tensor) -> bool:
        # Code that uses a lower precision in between rounds the two models differently.
        finite = one.isfinite()
        if not torch.equal(finite, two.isfinite()):
            return False
        tolerance = compute_tolerance(recorder.precision)
        return compute_relative_difference(one[finite], two[finite]) <= tolerance

    def is_preserved_by(folded: nn.Module) -> bool:
        try:
            after = _find_float_outputs(_run_model(_copy_without_grad(folded, wide), inputs, wide))
        except Exception:
            return False
        return len(before) == len(after) and all(map(is_same_output, before, after))

    return BatchNormUses(
        select_foldable(recorder.sources, find_norms_and_layers(model), recorder.read), recorder.read, is_preserved_by
    )


def _copy_without_grad(model: nn.Module, wide: bool) -> nn.Module:
    """Return a copy without gradients, since an autograd graph would keep the outputs of layers alive."""
    new = copy_model(model).requires_grad_(False)
    return new.double() if wide else new


def _run_model(model: nn.Module, inputs: ModelInputs, wide: bool) -> ModelOutput:
    def convert_tensor(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        return copy.double() if wide and copy.is_floating_point() else copy

    args, kwargs = tree_map_only(Tensor, convert_tensor, inputs)
    torch.manual_seed(0)  # for models that draw random numbers
    return model(*args, **kwargs)


def _find_float_outputs(outputs: ModelOutput) -> list[Tensor]:
    return [tensor for tensor in find_tensors(outputs) if tensor.is_floating_point()]


class _StorageReadRecorder(TorchDispatchMode):
    """Records which memory each operation reads.

    Attributes:
        sources: for each BatchNorm, the layer whose output it received.
        read: the parts whose tensors were read by other code.
        precision: the largest machine epsilon among all results.
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
        # Weak references to memory show what is still alive, and are not reused for other memory.
        self._made: dict[StorageWeakRef, str] = {}
        self._owners: dict[StorageWeakRef, set[str]] = defaultdict(set)
        for name, module in parts.items():
            for tensor in get_tensors(module):
                if (memory := _get_storage_ref(tensor)) is not None:
                    self._owners[memory].add(name)
            module.register_forward_pre_hook(self._make_pre_hook(name), with_kwargs=True)
            module.register_forward_hook(self._make_post_hook(name))

    def _make_pre_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        norm = is_batch_norm(self._parts[name])

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(name)
            self._calls[name] += 1
            given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            memory = None if given is None else _get_storage_ref(given)
            source = self._made.get(memory) if norm and memory is not None else None
            if source is None or given is None:
                return
            if source in self.sources.values():
                self._shared.add(source)
            elif given.dim() == get_output_dimensions(self._parts[source]):
                self.sources[name] = source

        return hook

    def _make_post_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        norm = is_batch_norm(self._parts[name])

        def hook(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
            self._running.pop()
            if not norm and (memory := _get_storage_ref(result)) is not None:
                self._made[memory] = name

        return hook

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (memory := _get_storage_ref(leaf)) is not None:
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
        """Keep only layers that were called once and whose output went only into a BatchNorm."""
        self._shared |= {name for memory, name in self._made.items() if not memory.expired()}
        self.sources = {
            norm: layer
            for norm, layer in self.sources.items()
            if self._calls[norm] == self._calls[layer] == 1 and layer not in self._shared
        }


def _get_storage_ref(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's memory, or None if it has none (sparse tensors, tensors inside vmap)."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except NotImplementedError:
        return None
