"""The user's model and session on loan: whatever happens inside, they come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from saltflat.errors import ModelError, OptionError
from saltflat.randomness import remembered


@contextmanager
def loan(model: nn.Module, mode: str, data: Any = None) -> Iterator[list[str]]:
    """Measure under fixed conditions: eval mode (unless ``mode="keep"``), gradients on, autocast and fused kernels off.

    Parameters and buffers are never handed out themselves (see :class:`saltflat.network.Network`), so what is left to
    give back is the modes of the modules, the random states and a few global switches. Yields notes for the reader of
    the result.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Got a model of type {type(model).__name__}. Want a torch.nn.Module. Do: wrap the function in one."
        )
    _check_kind(model)
    if mode not in ("eval", "keep"):
        raise OptionError(f"Got mode={mode!r}. Want 'eval' or 'keep'. Do: leave it out to measure in eval mode.")
    modes = [(module, module.training) for module in model.modules()]
    notes: list[str] = []
    with ExitStack() as stack:
        stack.callback(remembered())
        for generator in _generators(data):
            stack.callback(generator.set_state, generator.get_state())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in {"cpu", *(p.device.type for p in model.parameters() if p.device.type != "meta")}:
            stack.enter_context(torch.autocast(device, enabled=False))
        # The fused encoder layers skip their sub-modules, and flash attention cannot be differentiated twice.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        stack.enter_context(full_precision(model))
        stack.enter_context(own_forward(model))
        # A compiled model would compile our taps into its graphs.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            if mode == "eval":
                for module, _ in modes:
                    module.training = False
                if any(training for _, training in modes):
                    notes.append(
                        "The model was in train mode; it was measured in eval mode and given back in train mode."
                    )
            yield notes
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Convolutions and products with all the digits of float32: the shorter TF32 leaves three of them."""
    cudnn, products = torch.backends.cudnn, torch.get_float32_matmul_precision()
    # cuDNN's recurrent kernels have no backward pass in eval mode.
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with cudnn.flags(
        cudnn.enabled and not recurrent, cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
    ):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(products)


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """The model without the autocast that Accelerate puts around its forward pass: curvature needs all the digits."""
    with ExitStack() as stack:
        for held in map(vars, model.modules()):
            wrapped = held.get("forward")
            # Others keep an original forward, too, for reasons of their own.
            if type(getattr(wrapped, "__wrapped__", None)).__name__ == "ConvertOutputsToFp32":
                stack.callback(held.__setitem__, "forward", wrapped)
                held["forward"] = held["_original_forward"]
        yield


def _check_kind(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(f"Got a {type(model).__name__}. Want the model inside of it. Do: pass model.module.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"a TorchScript module as {name!r}" if name else "a TorchScript model"
            raise ModelError(f"Got {which}. Want an ordinary module. Do: pass the model it was made from.")
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"Got {name!r} without a shape yet. Want initialised layers. Do: run a batch through the model."
            )


def _generators(data: Any) -> list[torch.Generator]:
    """Random generators that reading the data would move on."""
    holders = [data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)]
    found = {id(g): g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)}
    return list(found.values())
