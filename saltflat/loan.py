"""The user's model and session on loan: whatever happens inside, they come back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import checkpoint

from saltflat.amounts import is_choice
from saltflat.attributes import AttributeSnapshot
from saltflat.data import find_unsupported_kind
from saltflat.errors import DeviceError, ModelError, OptionError
from saltflat.randomness import snapshot_rng
from saltflat.turns import borrow_model

TRAIN_MODE = "The model was in train mode; it was measured in eval mode and given back in train mode."


@contextmanager
def open_session(model: nn.Module, mode: str, data: Any = None) -> Iterator[list[str]]:
    """Measure under fixed conditions: eval mode (unless ``mode="keep"``), gradients on, autocast and fused kernels off.

    Parameters and buffers are never handed out themselves (see :class:`saltflat.network.Network`), so what is left to
    give back is the modes of the modules, the random states and a few global switches. Yields notes for the reader of
    the result.
    """
    check_module(model)
    _check_no_transforms()
    if not is_choice(mode, ("eval", "keep")):
        raise OptionError(f"Got mode={mode!r}. Want 'eval' or 'keep'. Do: leave it out to measure in eval mode.")
    notes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(borrow_model(model))
        check_tensors(model)
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
        stack.enter_context(disable_checkpointing())
        # A compiled model would compile our taps into its graphs.
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
def use_full_precision(model: nn.Module) -> Iterator[None]:
    """Convolutions and products with all the digits of float32: TF32 leaves three of them, bfloat16 two."""
    # cuDNN's recurrent kernels have no backward pass in eval mode.
    cudnn, recurrent = torch.backends.cudnn, any(isinstance(module, nn.RNNBase) for module in model.modules())
    enabled, back = cudnn.enabled, snapshot_precision()
    try:
        set_precision("highest")
        if recurrent:
            cudnn.enabled = False
        yield
    finally:
        cudnn.enabled = enabled
        back()


# Which precision each backend takes for each kind of operation; "all" stands in for the kinds that say "none", and
# the generic setting for backends that do.
_PRECISIONS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn", "all")]
_GENERIC = ("generic", "all")


def snapshot_precision() -> Callable[[], None]:
    """A function that puts torch's precision settings back, old and new ones, in whatever order they were set.

    The new settings (torch 2.9, ``fp32_precision``) show what is in force, not what was set, and the old ones
    (``allow_tf32``, ``set_float32_matmul_precision``) cannot be read where the new ones say something else. So what was
    set is read from the outermost setting inward, each setting out of the way of the next.
    """
    kept: dict[tuple[str, str], str] = {}
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for key in [_GENERIC, *reversed(_PRECISIONS)]:
            kept[key] = torch._C._get_fp32_precision_getter(*key)
            torch._C._set_fp32_precision_setter(*key, "none")
    products = torch.get_float32_matmul_precision()
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it is set, and the new settings, which are out of the way, say that it is not
        allowed = True

    def restore_precision() -> None:
        # Each of these writes to new settings, too.
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = allowed
        for key, value in kept.items():
            torch._C._set_fp32_precision_setter(*key, value)

    restore_precision()
    return restore_precision


def set_precision(products: str) -> None:
    """Set all of torch's precision settings: ``"highest"`` for all digits of float32, ``"high"`` for TF32."""
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = products != "highest"
    if hasattr(torch._C, "_set_fp32_precision_setter"):
        for backend, kind in _PRECISIONS:
            if products == "highest" or backend == "cuda":
                torch._C._set_fp32_precision_setter(backend, kind, "ieee" if products == "highest" else "tf32")


@contextmanager
def remove_accelerate_autocast(model: nn.Module) -> Iterator[None]:
    """The model without the autocast that Accelerate puts around its forward pass: curvature needs all the digits."""
    with ExitStack() as stack:
        for held in map(vars, model.modules()):
            wrapped = held.get("forward")
            # Others keep an original forward, too, for reasons of their own.
            if type(getattr(wrapped, "__wrapped__", None)).__name__ == "ConvertOutputsToFp32":
                stack.callback(held.__setitem__, "forward", wrapped)
                held["forward"] = held["_original_forward"]
        yield


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run checkpointed functions as if they were not: ``torch.utils.checkpoint`` in either of its kinds.

    The backward pass would run them again, when the model has its own parameters back, and take what that saves for
    what the forward pass saved: by position, so that tensors of the same shape are mistaken for each other.
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
            "Got a call inside of a torch.func transform (vmap, grad, vjp, jvp). "
            "Want a call outside: measuring differentiates the model itself. "
            "Do: call it before or after, once per model."
        )


def check_module(model: Any) -> None:
    """Refuse what is no module, or only holds the one that is meant."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Got a model of type {type(model).__name__}. Want a torch.nn.Module. Do: wrap the function in one."
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(f"Got a {type(model).__name__}. Want the model inside of it. Do: pass model.module.")


def check_tensors(model: nn.Module, buffers: bool = True) -> None:
    """Refuse modules whose tensors cannot be swapped or moved: TorchScript's, and all but dense ones with values.

    Args:
        model: any module.
        buffers: whether its buffers are looked at, too; training leaves them to the model.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"a TorchScript module as {name!r}" if name else "a TorchScript model"
            raise ModelError(f"Got {which}. Want an ordinary module. Do: pass the model it was made from.")
    for name, value in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]:
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"Got {name!r} without a shape yet. Want initialised layers. Do: run a batch through the model."
            )
        kind = find_unsupported_kind(value)
        if kind == "meta":
            raise DeviceError(
                f"Got {name!r} on the meta device, without values. Want a model that can be run, on cpu or a GPU. "
                "Do: load its weights first."
            )
        if kind is not None:
            raise ModelError(
                f"Expected parameters and buffers that are dense tensors, but got {name!r}, a {kind} tensor. "
                "Try keeping a dense one in its place, with to_dense() or to_padded_tensor()."
            )


def _find_generators(data: Any) -> list[torch.Generator]:
    """Random generators that reading the data would move on."""
    holders = [data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)]
    found = {id(g): g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)}
    return list(found.values())
