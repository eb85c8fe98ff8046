"""Tiny examples and shrunk networks for training, and what it means that two trainings agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saltflat.studies.data import Examples
from saltflat.studies.row import TrainedNetwork

SHRUNK: dict[str, dict[str, Any]] = {
    "mlp": {"widths": (7, 5)},
    "lenet5": {"channels": (2, 3), "units": (7, 5)},
    "ibayashi_mlp": {"widths": (6, 5, 4)},
    "petzka_mlp": {"widths": (6, 5, 4, 3)},
    "ibayashi_lenet": {"channels": (2, 3, 4), "units": 6},
    "cnn6": {"width": 3},
    "resnet20": {"width": 2},
    "wrn_16_4": {"width": 2, "factor": 2},
    "wrn_28_2": {"width": 2, "factor": 2},
    "densenet_bc": {"growth": 2, "depth": 10},
}


def examples(
    shape: tuple[int, ...] = (6,), train: int = 29, test: int = 17, classes: int = 3, seed: int = 0
) -> Examples:
    """Blobs, one for each class, that can be learnt."""
    draws = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, *shape, generator=draws)
    labels = torch.arange(train + test) % classes
    inputs = centres[labels] + 0.5 * torch.randn(train + test, *shape, generator=draws)
    return Examples(inputs[:train], labels[:train], inputs[train:], labels[train:])


def assert_same(found: Sequence[TrainedNetwork], wanted: Sequence[TrainedNetwork], tolerance: float = 1e-9) -> None:
    """The same weights and the same end, up to the rounding of float64."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert list(one.weights) == list(other.weights)
        for name, value in other.weights.items():
            assert value.isfinite().all()
            largest = float(value.double().abs().max())
            torch.testing.assert_close(one.weights[name], value, rtol=tolerance, atol=tolerance * largest)
        mine, theirs = one.outcome, other.outcome
        assert (mine.status, mine.epochs, mine.parameters) == (theirs.status, theirs.epochs, theirs.parameters)
        assert (mine.train_examples, mine.test_examples) == (theirs.train_examples, theirs.test_examples)
        for field in ("train_loss", "train_error", "test_loss", "test_error", "norm", "distance"):
            assert math.isfinite(getattr(theirs, field))
            assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=tolerance), field
        assert mine.curve == pytest.approx(theirs.curve, rel=tolerance)


class Undecided(nn.Module):
    """Looks at a number to decide what to do, which cannot be done for many networks at once."""

    def __init__(self, units: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


def undecided(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Undecided(shape[0], classes)


def noisy(shape: tuple[int, ...], classes: int, *, share: float = 0.5) -> nn.Module:
    """With torch's own dropout, which draws from the global generator."""
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Dropout(share), nn.Linear(8, classes))


class PartlyFixed(nn.Module):
    """One layer is not trained, one is not used, and one stands in two places."""

    def __init__(self, units: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(units, units)
        self.first.weight.requires_grad_(False)
        self.again = self.first
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.again(self.first(x)).relu())
        return out


def partly_fixed(shape: tuple[int, ...], classes: int) -> nn.Module:
    return PartlyFixed(shape[0], classes)


def odd_convolutions(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Every option of a convolution somewhere."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, padding=1), nn.ReLU(),
        nn.Conv2d(4, 4, 3, dilation=2, padding=2), nn.ReLU(),
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes),
    )  # fmt: skip


class Tied(nn.Module):
    """One layer under two names, whose weight is also a third layer's: torch.func replaces only some of these."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 5)
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.again = self.one
        self.two.weight = self.one.weight
        self.last = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).tanh()
        for layer in (self.one, self.two, self.again):
            x = layer(x).tanh()
        found: Tensor = self.last(x)
        return found


class Remembering(nn.Module):
    """Takes a running mean away, which it keeps in a buffer that is assigned, or counts its passes."""

    mean: Tensor

    def __init__(self, inputs: int, classes: int, counts: bool) -> None:
        super().__init__()
        self.last = nn.Linear(inputs, classes)
        self.register_buffer("mean", torch.zeros(inputs))
        self.counts, self.passes = counts, 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training and self.counts:
            self.passes += 1
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        found: Tensor = self.last(x - self.mean) * (1 + self.passes)
        return found


class OneByOne(nn.Module):
    """Convolves images one after the other."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(shape[0], 3, 5)
        self.last = nn.Linear(3 * (shape[1] - 4) * (shape[2] - 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.stack([self.convolution(each).relu() for each in x]).flatten(1))
        return found


def tied(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Tied(math.prod(shape), classes)


def remembering(shape: tuple[int, ...], classes: int, *, counts: bool = False) -> nn.Module:
    return Remembering(math.prod(shape), classes, counts)


def one_by_one(shape: tuple[int, ...], classes: int) -> nn.Module:
    return OneByOne(shape, classes)


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The old way of normalizing weights, which cannot be copied."""
    return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(math.prod(shape), classes)))


def words(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(3 * shape[0], classes))


class Casting(nn.Module):
    """Works in float32 alone."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x.flatten(1).float())
        return found


def casting(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Casting(math.prod(shape), classes)


class RunningMean(nn.Module):
    """Writes to a buffer of its own in every pass."""

    def __init__(self, units: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(units, classes)
        self.register_buffer("mean", torch.zeros(units))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        found: Tensor = self.layer(x - self.mean)
        return found


def running_mean(shape: tuple[int, ...], classes: int) -> nn.Module:
    return RunningMean(shape[0], classes)


class FrozenNorm(nn.Module):
    """Keeps its BatchNorm in eval mode, as is common in fine-tuning."""

    def __init__(self, units: int, classes: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(units, 6), nn.BatchNorm1d(6), nn.Linear(6, classes)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(x)).relu())
        return found


def frozen_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    return FrozenNorm(shape[0], classes)


def instance_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Of images, with running statistics."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(),
        nn.Flatten(), nn.Linear(4 * (height - 2) * (width - 2), classes),
    )  # fmt: skip


class Shifted(nn.Module):
    """Subtracts a large number from its inputs, which bfloat16 does not resolve."""

    def __init__(self, units: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x - 1000.0)
        return found


def shifted(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Shifted(shape[0], classes)


def normed_and_noisy(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Rarely drops a unit, so that a few examples seldom show it."""
    return nn.Sequential(nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.Dropout(0.01), nn.Linear(6, classes))


def transposed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """With a layer that vmap cannot run under autocast."""
    channels, height, width = shape
    units = 2 * (height + 2) * (width + 2)
    return nn.Sequential(nn.ConvTranspose2d(channels, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(units, classes))
