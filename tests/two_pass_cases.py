"""Small networks and batches, and the ways to train them with two passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from saltflat.training import ASAM, SAM, GradientNormPenalty
from saltflat.training.two_pass import TwoPass

Kind = Callable[..., TwoPass]
KINDS: tuple[Kind, ...] = (SAM, ASAM, GradientNormPenalty)
OPTIONS: dict[Kind, dict[str, float]] = {
    SAM: {"rho": 0.3},
    ASAM: {"rho": 0.3, "eta": 0.02},
    GradientNormPenalty: {"rho": 0.3, "balance": 0.7},
}
BASES: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda params: AdamW(params, lr=0.01),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.unflatten(1, (2, 4))
        hidden: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return self.head(hidden.flatten(1))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One parameter under two names, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.again = nn.Linear(8, 5, bias=False), nn.Linear(8, 5, bias=False)
        self.down, self.head = nn.Linear(5, 8, bias=False), nn.Linear(8, 3)
        self.again.weight = self.up.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.down(self.again(self.down(self.up(inputs).tanh())).tanh()))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 3)),
    "attention": Attention,
    "tied": Tied,
}


def made(name: str = "mlp", dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().to(dtype)


def batches(count: int = 20, size: int = 7, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=source, dtype=dtype), torch.randint(3, (size,), generator=source))
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def closure_of(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, optimizer: Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for batch in data:
        optimizer.step(closure_of(model, optimizer, batch))


def same(one: nn.Module, two: nn.Module, tolerance: float = 0) -> None:
    """Parameters and buffers."""
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=tolerance, atol=tolerance)


def both(name: str = "mlp", **options: Any) -> tuple[nn.Module, SAM]:
    model = made(name)
    return model, SAM(model, SGD, lr=0.1, momentum=0.9, **options)


def explicit(model: nn.Module, optimizer: TwoPass, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    with optimizer.first_pass():
        loss_of(model, batch).backward()
    optimizer.first_step()
    loss_of(model, batch).backward()
    optimizer.second_step()


def by_closure(model: nn.Module, optimizer: TwoPass, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.step(closure_of(model, optimizer, batch))


WAYS = {"closure": by_closure, "explicit": explicit}


def scaled(model: nn.Module, batch: tuple[Tensor, Tensor], scaler: torch.amp.GradScaler) -> None:
    """In float16 on a GPU, where there is a need to scale."""
    with torch.autocast("cuda", torch.float16, enabled=batch[0].is_cuda):
        loss = loss_of(model, batch)
    scaler.scale(loss).backward()


def scaled_closure(
    model: nn.Module, optimizer: TwoPass, batch: tuple[Tensor, Tensor], scaler: torch.amp.GradScaler
) -> None:
    def closure() -> None:
        optimizer.zero_grad()
        scaled(model, batch, scaler)

    optimizer.step(closure, scaler=scaler)


def scaled_explicit(
    model: nn.Module, optimizer: TwoPass, batch: tuple[Tensor, Tensor], scaler: torch.amp.GradScaler
) -> None:
    scaled_gradients(model, optimizer, batch, scaler)
    optimizer.second_step(scaler)


def scaled_clipped(
    model: nn.Module, optimizer: TwoPass, batch: tuple[Tensor, Tensor], scaler: torch.amp.GradScaler
) -> None:
    scaled_gradients(model, optimizer, batch, scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e3)  # clips nothing
    optimizer.second_step(scaler)


def scaled_gradients(
    model: nn.Module, optimizer: TwoPass, batch: tuple[Tensor, Tensor], scaler: torch.amp.GradScaler
) -> None:
    optimizer.zero_grad()
    with optimizer.first_pass():
        scaled(model, batch, scaler)
    optimizer.first_step(scaler)
    scaled(model, batch, scaler)


def scaled_by_the_scaler(
    model: nn.Module, optimizer: TwoPass, batch: tuple[Tensor, Tensor], scaler: torch.amp.GradScaler
) -> None:
    optimizer.zero_grad()
    with optimizer.first_pass():
        scaled(model, batch, scaler)
    optimizer.first_step()
    scaled(model, batch, scaler)
    scaler.step(optimizer)


SCALED_WAYS = {
    "closure": scaled_closure,
    "explicit": scaled_explicit,
    "clipped": scaled_clipped,
    "by the scaler": scaled_by_the_scaler,
}
