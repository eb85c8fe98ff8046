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
