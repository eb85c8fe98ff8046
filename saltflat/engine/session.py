"""The session: it lends the model to a measurement under fixed conditions, and gives it back as it was."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from os import PathLike
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import checkpoint

from saltflat.engine.data import Data, find_unsupported_kind
from saltflat.engine.precision import use_full_precision
from saltflat.errors import DeviceError, ModelError, OptionError, ParameterError, PrecisionError
from saltflat.results.caveats import TRAIN_MODE
from saltflat.validation import borrow_model, is_choice

# Attributes of every module: parameters, buffers, submodules and hooks, which are handled elsewhere.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

# Larger containers are compared by length between passes, and entry by entry only at the end.
FEW = 64

Container: TypeAlias = list[Any] | dict[Any, Any] | set[Any] | deque[Any]
Contents: TypeAlias = list[Any] | dict[Any, Any]  # a copy of a container's entries
Attribute: TypeAlias = Tensor | np.ndarray[Any, Any] | Container | tuple[Any, ...] | SimpleNamespace | None


class AttributeSnapshot:
    """A copy of the lists, dicts, sets, arrays and tensors that modules hold beside their parameters and buffers.

    A forward pass may append to a list or write into a tensor. Attributes that are rebound are not covered here:
    :class:`saltflat.engine.network.Network` restores the modules' ``vars`` after each pass.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._registered = {
            id(value): value
            for module in modules
            for value in (*module._parameters.values(), *module._buffers.values())
            if value is not None
        }
        self._containers: list[tuple[Container, Contents]] = []
        self._tensors: list[tuple[Tensor, Tensor, list[int]]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._aliases: list[Container] = []
        self._seen: set[int] = set()
        for module in modules:
            own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
            if any(id(value) in self._registered for value in own.values()):
                self._aliases.append(vars(module))
            for value in own.values():
                self._visit_value(value)

    def _visit_value(self, value: Attribute) -> None:
        if id(value) in self._seen or id(value) in self._registered:
            return
        if isinstance(value, Tensor):
            if value.layout == torch.strided and value.device.type != "meta" and not value.is_nested:
                self._seen.add(id(value))
                self._tensors.append((value, value.detach().clone(), [get_tensor_version(value)]))
        elif isinstance(value, np.ndarray):
            self._seen.add(id(value))
            self._arrays.append((value, value.copy()))
        elif isinstance(value, list | dict | set | deque | tuple):
            self._seen.add(id(value))
            entries = list(value.values()) if isinstance(value, dict) else list(value)
            if not isinstance(value, tuple):
                self._containers.append((value, _copy_container(value)))
                if not isinstance(value, set) and any(id(entry) in self._registered for entry in entries):
                    self._aliases.append(value)
            for entry in entries:
                self._visit_value(entry)
        elif isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
            self._visit_value(getattr(value, "__dict__", None))

    def replace_aliases(self, values: Mapping[int, Tensor]) -> None:
        """Replace parameters that attributes and containers hold by other tensors, given by the parameters' ids."""
        for container in self._aliases:
            keys = container.keys() if isinstance(container, dict) else range(len(container))
            for key in list(keys):
                if id(container[key]) in values:  # type: ignore[index]
                    container[key] = values[id(container[key])]  # type: ignore[index]

    def restore_aliases(self) -> None:
        """Undo :meth:`replace_aliases` in containers. The modules' own attributes are restored by the network."""
        kept = {id(container): copy for container, copy in self._containers}
        for container in self._aliases:
            if id(container) in kept:
                _refill_container(container, kept[id(container)])

    def restore(self, thorough: bool = False) -> None:
        """Restore all contents; ``thorough`` also finds writes that bypass version counters and lengths."""
        for container, copy in self._containers:
            if len(container) != len(copy) or (
                (thorough or len(copy) <= FEW) and not _has_same_entries(container, copy)
            ):
                _refill_container(container, copy)
        for tensor, value, version in self._tensors:
            if (
                get_tensor_version(tensor) != version[0]
                or tensor.shape != value.shape
                or (thorough and not _is_same_tensor(tensor, value))
            ):
                _write_tensor(tensor, value)
                version[0] = get_tensor_version(tensor)
        if thorough:
            for array, numbers in self._arrays:
                np.copyto(array, numbers)


def get_tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was written to, or -1 for inference tensors, which do not count it."""
    return -1 if tensor.is_inference() else tensor._version


def _is_same_tensor(tensor: Tensor, copy: Tensor) -> bool:
    return bool(((tensor == copy) | (copy != copy)).all())


def _write_tensor(tensor: Tensor, copy: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != copy.shape:
            tensor.data = copy.clone()
        else:
            tensor.detach().copy_(copy)


def _copy_container(container: Container) -> Contents:
    return dict(container) if isinstance(container, dict) else list(container)


def _has_same_entries(container: Container, copy: Contents) -> bool:
    def is_identical(one: Iterable[Any], two: Iterable[Any]) -> bool:
        return all(a is b for a, b in zip(one, two, strict=True))

    if isinstance(container, dict) and isinstance(copy, dict):
        return is_identical(container, copy) and is_identical(container.values(), copy.values())
    if isinstance(container, set):
        return all(entry in container for entry in copy)
    return is_identical(container, copy)


def _refill_container(container: Container, copy: Contents) -> None:
    add: Callable[[Any], Any] = container.extend if isinstance(container, list | deque) else container.update
    container.clear()
    add(copy)


def snapshot_rng() -> Callable[[], None]:
    """Return a function that restores the current random states of Python, NumPy and torch.

    Example:
        >>> restore = snapshot_rng()
        >>> first = torch.rand(3)
        >>> restore()
        >>> bool((torch.rand(3) == first).all())
        True
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore_rng() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore_rng


@contextmanager
def open_session(model: nn.Module, mode: str, data: Data | None = None) -> Iterator[list[str]]:
    """Lend the model under fixed conditions, and give it back bit for bit as it was.

    Inside, the model belongs to this thread and is in eval mode (unless ``mode="keep"``). Gradients are on; autocast,
    fused kernels, TF32, checkpointing, compilation and the packing of quantized weights are off. The session restores
    the modes of the modules, their plain attributes, the random states (also those of the generators of ``data``) and
    torch's global settings. Parameters and buffers are never written to: :class:`saltflat.engine.network.Network` runs
    the model with copies.

    Yields:
        Notes for the reader of the result.
    """
    check_module(model)
    _check_no_transforms()
    if not is_choice(mode, ("eval", "keep")):
        raise OptionError(
            f"Expected 'eval' or 'keep', but got mode={mode!r}. Try leaving it out to measure in eval mode."
        )
    notes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(borrow_model(model))
        check_tensors(model)
        check_attention(model)
        modes = [(module, module.training) for module in model.modules()]
        attributes = AttributeSnapshot(model.modules())
        stack.callback(attributes.restore, thorough=True)
        stack.callback(snapshot_rng())
        for generator in _find_generators(data):
            stack.callback(generator.set_state, generator.get_state())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {"cpu", *(p.device.type for p in model.parameters())}:
            stack.enter_context(torch.autocast(device, enabled=False))
        # The fused encoder layers skip their sub-modules, and flash attention cannot be differentiated twice.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        stack.enter_context(use_full_precision(model))
        stack.enter_context(remove_accelerate_autocast(model))
        stack.enter_context(keep_weights_differentiable(model))
        stack.enter_context(disable_checkpointing())
        # A compiled model would compile the network's taps into its graphs.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            if mode == "eval":
                for module, _ in modes:
                    module.training = False
                if any(training for _, training in modes):
                    notes.append(TRAIN_MODE)
            yield notes
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def remove_accelerate_autocast(model: nn.Module) -> Iterator[None]:
    """Remove the autocast that Accelerate wraps around the forward pass: curvature needs full precision."""
    with ExitStack() as stack:
        for held in map(vars, model.modules()):
            wrapped = held.get("forward")
            # Other libraries keep an original forward too, for their own reasons.
            if type(getattr(wrapped, "__wrapped__", None)).__name__ == "ConvertOutputsToFp32":
                stack.callback(held.__setitem__, "forward", wrapped)
                held["forward"] = held["_original_forward"]
        yield


@contextmanager
def keep_weights_differentiable(model: nn.Module) -> Iterator[None]:
    """Keep layers of bitsandbytes from packing weights for inference on a CPU, which cuts gradients at these layers."""
    packs = "support_avx512bf16_for_cpu"
    layers = [module for module in model.modules() if vars(module).get(packs)]
    for name, value in model.named_parameters() if layers else ():
        if getattr(getattr(value, "quant_state", None), "packing_format_for_cpu", False):
            raise ParameterError(
                f"Expected weights that gradients pass through, but got {name!r}, packed for inference on a CPU by "
                "bitsandbytes. Try model.state_dict(), which unpacks them."
            )
    try:
        for module in layers:
            setattr(module, packs, False)
        yield
    finally:
        for module in layers:
            setattr(module, packs, True)


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run functions under ``torch.utils.checkpoint``, reentrant or not, as if they were not checkpointed.

    The backward pass would run them again after the model got its own parameters back, and match the tensors saved then
    by position with those of the forward pass, so that tensors of equal shape would be mistaken for each other.
    """

    class PlainFunction:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    instead = {"CheckpointFunction": PlainFunction, "_checkpoint_hook": lambda frame: nullcontext()}
    with ExitStack() as stack:
        for name, value in instead.items():
            if hasattr(checkpoint, name):
                stack.callback(setattr, checkpoint, name, getattr(checkpoint, name))
                setattr(checkpoint, name, value)
        yield


def _check_no_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise OptionError(
            "Expected a call outside of torch.func transforms, but got one inside (vmap, grad, vjp, jvp). "
            "Measuring differentiates the model itself. Try calling it before or after, once per model."
        )


def check_module(model: nn.Module) -> None:
    """Check that the model is a module, and not a wrapper for data-parallel training."""
    if not isinstance(model, nn.Module):
        loads = isinstance(model, str | PathLike | Mapping)  # a checkpoint, or the weights from one
        hint = "building the model and loading the weights into it" if loads else "wrapping the function in one"
        raise ModelError(f"Expected a torch.nn.Module, but got a model of type {type(model).__name__}. Try {hint}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"Expected the model itself, but got the wrapper {type(model).__name__}. Try passing model.module."
        )


def check_attention(model: nn.Module) -> None:
    """Check that no part of a model of transformers calls FlashAttention itself, which has no float32.

    The attention of torch is told to use kernels that can be differentiated twice; see :func:`open_session`.
    """
    for module in model.modules():
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(used, str) and "flash" in used:
            raise PrecisionError(
                f"Expected attention that computes in float32, but got {used!r}, which computes in half precision and "
                "cannot be differentiated twice. Try model.set_attn_implementation('sdpa')."
            )


def check_tensors(model: nn.Module, buffers: bool = True) -> None:
    """Check that all tensors of a model can be replaced: no TorchScript, only dense tensors with values.

    Args:
        model: any module.
        buffers: whether to check its buffers too. Training does not touch them.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"a TorchScript module as {name!r}" if name else "a TorchScript model"
            raise ModelError(f"Expected an ordinary module, but got {which}. Try passing the model it was made from.")
    for name, value in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]:
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"Expected initialized layers, but got {name!r} without a shape yet. Try running a batch through the "
                "model."
            )
        kind = find_unsupported_kind(value)
        if kind == "meta" and any("_hf_hook" in vars(module) for module in model.modules()):
            raise DeviceError(
                f"Expected a model that is loaded as a whole, but got {name!r} offloaded by Accelerate. Try "
                "loading it onto one device, with device_map={'': 'cpu'}."
            )
        if kind == "meta":
            raise DeviceError(
                f"Expected a model that can be run, on cpu or a GPU, but got {name!r} on the meta device, without "
                "values. Try loading its weights first."
            )
        if kind is not None:
            raise ModelError(
                f"Expected parameters and buffers that are dense tensors, but got {name!r}, a {kind} tensor. "
                "Try keeping a dense one in its place, with to_dense() or to_padded_tensor()."
            )


def _find_generators(data: Data | None) -> list[torch.Generator]:
    """Return the random generators that reading the data would advance."""
    holders = [data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)]
    found = {id(g): g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)}
    return list(found.values())
