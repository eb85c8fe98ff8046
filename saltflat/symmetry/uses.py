"""Which BatchNorm is given what a layer returns, as the code of a model says."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from saltflat.errors import ModelError, format_error_line
from saltflat.symmetry.place import LIBRARY, TORCH
from saltflat.symmetry.same import copy_model

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
            f"Got a model that torch.fx cannot follow, {_format_error_line(error)} ({reason}). "
            "Want to know what each BatchNorm is given. Do: pass an example input: fold(model, example)."
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
