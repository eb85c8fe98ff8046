"""A network that fails at a chosen pass, and everything that must be the same before and after a call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class FaultError(Exception):
    """Injected."""


class Fuse(torch.autograd.Function):
    """The identity; counts its backward passes and blows at one of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tick: Callable[[], None]) -> Tensor:
        ctx.tick = tick
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.tick()
        return g, None


class Count:
    """Passes left until the fault. An object of its own: dicts of a module are restored between passes."""

    def __init__(self) -> None:
        self.left: dict[str, float] = {"forward": float("inf"), "backward": float("inf")}


class Bomb(nn.Module):
    """Passes its input on, and raises at the k-th forward or backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    @property
    def left(self) -> dict[str, float]:
        return self.count.left

    def tick(self, which: str) -> None:
        self.left[which] -= 1
        if self.left[which] < 0:
            raise FaultError(which)

    def forward(self, x: Tensor) -> Tensor:
        self.tick("forward")
        if not torch.is_grad_enabled() or not x.requires_grad:
            return x
        result: Tensor = Fuse.apply(x, lambda: self.tick("backward"))  # type: ignore[no-untyped-call]
        return result


def network() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        Bomb(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    first, last = net[0], net[6]
    assert isinstance(first, nn.Conv2d)
    assert isinstance(last, nn.Linear)
    last.weight.grad = torch.ones_like(last.weight)
    assert first.bias is not None
    first.bias.requires_grad_(False)
    net[2].eval()  # mixed modes
    net[6].register_forward_hook(lambda module, args, out: None)
    net[6].register_full_backward_hook(lambda module, before, after: None)
    return net


def snapshot(model: nn.Module) -> dict[str, Any]:
    def bits(tensor: Tensor | None) -> Any:
        return None if tensor is None else (id(tensor), tensor.detach().cpu().numpy().tobytes(), tensor._version)

    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    return {
        "parameters": {n: (bits(p), p.requires_grad, bits(p.grad), p.grad_fn, p.dtype) for n, p in parameters.items()},
        "buffers": {n: bits(b) for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in modules.items()},
        "attributes": {n: sorted(vars(m)) for n, m in modules.items()},
        "hooks": {
            n: {
                key: list(value.items())
                for key, value in vars(m).items()
                if key.endswith("hooks") and value is not None
            }
            for n, m in modules.items()
        },
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "random": (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
    }
