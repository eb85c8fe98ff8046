"""Networks, comparisons and records of the programs that measure in several processes."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

Pair = tuple[Tensor, Tensor]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(x + self.norms[1](self.two(inner)))


def make_mlp(examples: int = 23) -> tuple[nn.Sequential, Pair]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    return net, (torch.randn(examples, 5, dtype=torch.float64), torch.randint(4, (examples,)))


def make_resnet() -> tuple[nn.Module, Pair]:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Residual(4), *head).double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(4, dtype=torch.float64)
            module.running_var = torch.rand(4, dtype=torch.float64) + 0.5
    return net, (torch.randn(11, 3, 6, 6, dtype=torch.float64), torch.randint(3, (11,)))


def make_gpt() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    size = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    net = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).double()
    tokens = [torch.randint(11, (count, 6)) for count in (3, 1, 2)]
    return net, [{"input_ids": each, "labels": each} for each in tokens]


def find_differences(one: Any, two: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Yield the relative difference of every pair of numbers, infinite for whatever else differs."""
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        one, two = ({f.name: getattr(each, f.name) for f in dataclasses.fields(one)} for each in (one, two))
    if isinstance(one, Tensor):
        one, two = one.flatten().tolist(), two.flatten().tolist()
    if isinstance(one, float) and isinstance(two, float):
        same = one == two or (math.isnan(one) and math.isnan(two))
        # Beside the terms that cancel in it, a tiny number is rounding.
        yield where, 0.0 if same else abs(one - two) / max(abs(one), abs(two), 1e-2)
    elif isinstance(one, dict) and list(one) == list(two):
        for key in one:
            yield from find_differences(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, list | tuple) and len(one) == len(two):
        for number, pair in enumerate(zip(one, two, strict=True)):
            yield from find_differences(*pair, f"{where}/{number}")
    else:
        yield where, 0.0 if one == two else math.inf


def compare(one: Any, two: Any) -> tuple[str, float]:
    """Return the largest difference between two results that is not of time, and where it is."""
    timed = ("/seconds", "/created", "/started")
    found = [each for each in find_differences(one, two) if not each[0].startswith(timed)]
    assert len(found) > 100
    return max(found, key=lambda each: each[1])


class Recorder:
    """What one process saw, written after every step."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path, self.rank = folder / f"rank{rank}.json", rank
        self.seen: dict[str, Any] = {}

    def keep(self, name: str, value: Any) -> None:
        self.seen[name] = value
        self.path.write_text(json.dumps(self.seen), encoding="utf-8")

    def catch(self, name: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        try:
            call()
            said = "no error"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        self.keep(name, said)
        self.keep(f"{name} in seconds", time.perf_counter() - started)
