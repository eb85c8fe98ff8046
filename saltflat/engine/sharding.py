"""Weights of which each process has a part: gathered for a measurement (``fully_shard``), or refused.

Rules of layers need the inputs and the gradients of the outputs alone, but the passes need the weights. The
whole weights are gathered once, and the model runs without the hooks that would gather them layer by layer: other
processes may be at another chunk of their own examples, or at none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from saltflat.engine.processes import Processes
from saltflat.errors import ModelError

OWNER, FSDP1 = "torch.distributed.fsdp", "FullyShardedDataParallel"
STATES = ("__composable_api_state_key", "_is_fsdp_", "_fsdp_")  # attributes of modules


@contextmanager
def gather_weights(model: nn.Module, processes: Processes) -> Iterator[None]:
    """Put whole weights in the place of those that ``fully_shard`` has sharded, and restore the model afterwards.

    Args:
        model: any module. All processes that have a part of its weights have to call this.
        processes: that share the measurement.
    """
    wrapped = [module for module in model.modules() if _is_fully_sharded(module)]
    for module in wrapped:
        module.reshard()  # type: ignore[operator] # a forward pass may have left whole weights of its own
    _check_gatherable(model, wrapped, processes)
    if not wrapped:
        yield
        return
    whole: dict[int, nn.Parameter] = {}  # a tied weight stays one
    with ExitStack() as stack:
        for module in model.modules():
            own = vars(module)
            stack.callback(object.__setattr__, module, "__dict__", own)
            object.__setattr__(module, "__dict__", _make_plain_attributes(own, whole))
        for module in wrapped:
            stack.callback(setattr, module, "__class__", type(module))
            module.__class__ = type(module).__bases__[1]
        yield


def _make_plain_attributes(own: Mapping[str, Any], whole: dict[int, nn.Parameter]) -> dict[str, Any]:
    """Return the attributes of a module with whole weights, and without hooks and states of ``fully_shard``."""
    plain = {name: value for name, value in own.items() if not name.startswith(STATES)}
    for name, value in plain.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            plain[name] = type(value)((number, hook) for number, hook in value.items() if not _is_of_fsdp(hook))
    for value in own["_parameters"].values():
        if _is_dtensor(value) and id(value) not in whole:
            whole[id(value)] = nn.Parameter(value.full_tensor().detach(), value.requires_grad)
    plain["_parameters"] = {name: whole.get(id(value), value) for name, value in own["_parameters"].items()}
    return plain


def _check_gatherable(model: nn.Module, wrapped: list[nn.Module], processes: Processes) -> None:
    """Check that weights are whole, or that all processes with a part of them are here to give it."""
    below = {id(value) for module in wrapped for value in module.parameters()}
    present = set(processes.list_global_ranks())
    if any(kind.__name__ == FSDP1 for module in model.modules() for kind in type(module).__mro__):
        raise _make_sharded_error("a model", FSDP1)
    for name, value in model.named_parameters():
        if hasattr(value, "ds_id"):
            raise _make_sharded_error(repr(name), "DeepSpeed")
        if not _is_dtensor(value):
            continue
        if id(value) not in below:
            raise _make_sharded_error(repr(name), "tensor parallelism")
        mesh: Any = getattr(value, "device_mesh")  # noqa: B009 # torch types it as a plain parameter
        ranks = set(mesh.mesh.flatten().tolist())
        if len(ranks) > 1 and not ranks <= present:
            raise ModelError(
                f"Expected whole weights, but got {name!r}, of which {len(ranks)} processes have a part each. Try "
                "measuring in all of them, with process_group=torch.distributed.group.WORLD."
            )


def _make_sharded_error(what: str, how: str) -> ModelError:
    return ModelError(
        f"Expected whole weights, or weights sharded by fully_shard, but got {what}, sharded by {how}. Try measuring a "
        "model that was not sharded, with the weights of a full state_dict."
    )


def _is_fully_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" and kind.__module__.startswith(OWNER) for kind in type(module).__mro__)


def _is_dtensor(value: Tensor | None) -> bool:
    """Return whether a tensor is a ``DTensor``, whose module takes long to import where there is none."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(OWNER)
