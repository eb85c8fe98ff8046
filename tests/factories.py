"""Models and data for the command line to find by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(inputs: int = 4, width: int = 3, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def double() -> nn.Module:
    return mlp().double()


def no_model() -> str:
    return "not a model"


def broken() -> nn.Module:
    raise ZeroDivisionError("a mistake of the user's")


def leaving() -> nn.Module:
    raise SystemExit(3)


class Careless(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return {"a": inputs}["b"]


def careless() -> nn.Module:
    return Careless(4, 3)


fixed = mlp()


def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])


def dataset() -> TensorDataset:
    return TensorDataset(*pair())


class Torn(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        raise LookupError("a page is missing")


def torn() -> Torn:
    return Torn(*pair())


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=4)


def normed() -> nn.Module:
    """BatchNorm that can go into a layer, and one that cannot."""
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(inputs).relu())
        return out


def batches() -> list[tuple[Tensor, Tensor]]:
    inputs, targets = pair()
    return [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]


def stream() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=2, shuffle=True)


def words() -> dict[str, Tensor]:
    inputs, targets = pair()
    return {"input": inputs, "labels": targets}


def half_mlp() -> nn.Module:
    """Return the network in half precision."""
    return mlp().half()
