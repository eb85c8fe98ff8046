"""A meter whose model has changed since its last measurement gives the report of a fresh call, whatever has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import saltflat
from saltflat import Meter, Report

OPTIONS: dict[str, Any] = {
    "measures": ["hessian_trace", "rho", "minimum_unit_sharpness"],
    "certificate": False,
    "sampling": False,
    "progress": False,
}
OF_THE_CALL = {"seconds", "seconds_by_step", "created"}
SWITCH = {"slope": 0.0}


class Branched(nn.Module):
    """A small convolutional network whose forward pass uses attributes, a buffer and a global value."""

    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.one, self.two = nn.Linear(16, 4), nn.Linear(4, 4)
        self.head, self.act, self.residual = nn.Linear(4, 3), F.relu, True
        self.register_buffer("gain", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.leaky_relu(self.norm(self.conv(x)), SWITCH["slope"]))
        x = self.act(self.one(F.max_pool2d(x, 2).flatten(1))) * self.gain
        y = self.act(self.two(x))
        found: Tensor = self.head(x + y if self.residual else y)
        return found


class LowRank(nn.Module):
    """A frozen layer with a trained update of rank one beside it, as LoRA has."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 1, False), nn.Linear(1, layer.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def tie(model: Branched) -> None:
    model.head = nn.Linear(4, 4)
    model.head.weight = model.two.weight


def untie(model: Branched) -> None:
    tie(model)
    model.head.weight = nn.Parameter(model.two.weight.detach().clone())


def set_data(model: Branched) -> None:
    model.two.weight.data = torch.randn(4, 4)


def fill(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.fill_(value)


def skip_pixels(model: Branched) -> None:
    model.conv.stride = 2, 2
    model.one = nn.Linear(4, 4)


def reorder_weights(model: Branched) -> None:
    weight = torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last)
    model.conv.weight = nn.Parameter(weight)


def share_in_list(model: Branched) -> None:
    model.twins = nn.ModuleList([model.two, model.two])
    model.two = nn.Sequential(*model.twins)  # type: ignore[assignment]


# Each is applied to a model that was measured; the meter may notice, or go on with what it has where that is right.
CHANGES: dict[str, Callable[[Branched], object]] = {
    "nothing": lambda model: None,
    "the values of a buffer": lambda model: fill(model.gain, 3.0),
    "a value in the weights": lambda model: fill(model.two.weight[0], 0.0),
    "the storage of a parameter": set_data,
    "a parameter is another object": lambda model: setattr(model.two, "weight", nn.Parameter(torch.randn(4, 4))),
    "all weights of a layer are zero": lambda model: fill(model.two.weight, 0.0),
    "a parametrization": lambda model: parametrize.register_parametrization(model.two, "weight", Doubled()),
    "weight normalization": lambda model: parametrizations.weight_norm(model.two),
    "a pruning mask": lambda model: prune.l1_unstructured(model.two, "weight", 0.5),
    "the rate of dropout": lambda model: setattr(model.drop, "p", 0.9),
    "a low-rank adapter": lambda model: setattr(model, "two", LowRank(model.two)),
    "compiled in place": lambda model: model.compile(backend="eager"),
    "the class of a module": lambda model: setattr(model.two, "__class__", Scaled),
    "an activation held as a function": lambda model: setattr(model, "act", torch.tanh),
    "a branch is taken off": lambda model: setattr(model, "residual", False),
    "the eps of a normalization": lambda model: setattr(model.norm, "eps", 0.5),
    "the stride of a convolution": skip_pixels,
    "the padding of a convolution": lambda model: setattr(model.conv, "padding_mode", "circular"),
    "two parameters are tied": tie,
    "two parameters were tied and are not": untie,
    "a module is used twice": share_in_list,
    "all but a layer is frozen": lambda model: model.requires_grad_(False).head.requires_grad_(True),
    "a bias is gone": lambda model: setattr(model.two, "bias", None),
    "the memory format of weights": reorder_weights,
    "the precision of weights": lambda model: model.double(),
    "a global value": lambda model: SWITCH.update(slope=0.3),
    "the default precision": lambda model: torch.set_default_dtype(torch.float64),
    "a hook on a parameter": lambda model: model.two.weight.register_hook(lambda grad: 2 * grad),
}


def describe(report: Report) -> dict[str, str]:
    return {each.name: repr(getattr(report, each.name)) for each in fields(report) if each.name not in OF_THE_CALL}


def call(measure: Callable[[], Report]) -> dict[str, str] | str:
    """Return what a report says, or the error in its place."""
    try:
        return describe(measure())
    except saltflat.errors.SaltflatError as error:
        return str(error)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_model_is_noticed_or_harmless(what: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Branched().eval()
        data = torch.randn(12, 1, 4, 4), torch.arange(12) % 3
        try:
            meter = Meter(model, **OPTIONS)
            meter.measure(data)
            CHANGES[what](model)
            dtype = model.head.weight.dtype
            data = data[0].to(dtype), data[1]
            alone = call(lambda: saltflat.measure(model, data, **OPTIONS))
            assert call(lambda: meter.measure(data)) == alone
            assert call(lambda: meter.measure(data)) == alone
        finally:
            SWITCH["slope"] = 0.0
            torch.set_default_dtype(torch.float32)


# The loss a meter was made with may be changed in place, and is then another loss.
LOSSES: dict[str, Callable[[nn.CrossEntropyLoss], Any]] = {
    "class weights": lambda loss: loss.weight.mul_(torch.tensor([1.0, 2.0, 3.0])),  # type: ignore[union-attr]
    "label smoothing": lambda loss: setattr(loss, "label_smoothing", 0.3),
    "ignored labels": lambda loss: setattr(loss, "ignore_index", 2),
    "reduction": lambda loss: setattr(loss, "reduction", "sum"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_change_of_the_loss_is_noticed(what: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        data = torch.randn(12, 4), torch.arange(12) % 3
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    meter = Meter(model, loss, **OPTIONS)
    before = call(lambda: meter.measure(data))
    LOSSES[what](loss)
    alone = call(lambda: saltflat.measure(model, data, loss, **OPTIONS))
    assert call(lambda: meter.measure(data)) == alone != before
