"""Notes on inputs that cannot be right, with the numbers in them, and none on those that can."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat

MEASURES = ["hessian_trace", "fisher_trace"]


def trained(*last: nn.Module, pixels: int = 16, classes: int = 3) -> nn.Sequential:
    """Sure of each class by a pixel of its own."""
    torch.manual_seed(0)
    first = nn.Linear(pixels, classes)
    nn.init.zeros_(first.bias)
    with torch.no_grad():
        first.weight.copy_(8 * torch.eye(classes, pixels))
    return nn.Sequential(nn.Flatten(), first, *last)


def images(count: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 3
    inputs = torch.rand(count, 1, 4, 4, generator=generator)
    inputs.view(count, -1)[:, :3] = F.one_hot(labels, 3).float()
    return inputs, labels


def notes(model: nn.Module, data: Any, loss: Any = "cross_entropy") -> list[str]:
    report = saltflat.measure(model, data, loss, MEASURES, certificate=False)
    text = " ".join(str(report).split())
    assert all(note in text for note in report.notes)
    return [note for note in report.notes if "train mode" not in note]


class Bytes(nn.Module):
    """A model that takes images of bytes as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = trained()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x.float() / 255)
        return outputs


@pytest.mark.parametrize("kind", ["float", "resized", "flat", "bytes"])
def test_pixels_that_were_not_scaled_are_noted(kind: str) -> None:
    inputs, labels = images()
    assert not notes(trained(), (inputs, labels))
    whole = (255 * inputs).round()
    given = {"float": whole, "resized": 254.7 * inputs, "flat": whole.flatten(1), "bytes": whole.byte()}[kind]
    (note,) = notes(Bytes() if kind == "bytes" else trained(), (given, labels))
    assert f"from 0 to {float(given.max()):g}" in note or f"to {float(given.max()):g}, like pixels" in note
    assert "divide by 255" in note


def test_tokens_counts_and_normalized_images_are_not_taken_for_pixels() -> None:
    inputs, labels = images()
    assert not notes(trained(), ((inputs - 0.5) / 0.2, labels))
    tokens = torch.randint(200, (24, 5), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = labels
    model = nn.Sequential(nn.Embedding(200, 4), nn.Flatten(), nn.Linear(20, 3))
    assert not any("pixels" in note for note in notes(model, (tokens, labels)))
    (note,) = notes(trained(), (255 * inputs, labels))  # and these are
    assert "pixels" in note


def test_outputs_that_are_probabilities_are_noted() -> None:
    inputs, labels = images()
    (note,) = notes(trained(nn.Softmax(1)), (inputs, labels))
    assert "probabilities already" in note
    assert "softmax" in note
    several = F.one_hot(labels, 3).float()
    note, above = notes(trained(nn.Sigmoid()), (inputs, several), "bce_with_logits")
    assert "sigmoid" in note
    assert "no better than guessing" in above  # a second sigmoid leaves every probability above one half
    assert not notes(trained(), (inputs, labels))
    assert not notes(trained(nn.LogSoftmax(1)), (inputs, labels), nn.NLLLoss())


def test_a_loss_above_chance_is_noted_with_both_numbers() -> None:
    inputs, labels = images()
    wrong = (labels + 1) % 3
    with torch.no_grad():
        mean = float(F.cross_entropy(trained()(inputs), wrong))
    (note,) = notes(trained(), (inputs, wrong))
    assert f"{mean:.4g}" in note
    assert f"log 3 = {log(3):.4g}" in note
    assert "no better than guessing" in note
    (note,) = notes(trained(), (inputs, 1 - F.one_hot(labels, 3).float()), "bce_with_logits")
    assert f"log 2 = {log(2):.4g}" in note
    weighted = nn.CrossEntropyLoss(torch.tensor([5.0, 1.0, 0.1]), label_smoothing=0.1)
    assert len(notes(trained(), (inputs, wrong), weighted)) == 1
    assert not notes(trained(), (inputs, labels), weighted)
    assert not notes(trained(), (inputs, 1000 * F.one_hot(labels, 3).float()), "mse")
    found = saltflat.compute_statistics(trained(), (inputs, wrong), names="curvature_trace")
    assert any("no better than guessing" in note for note in found.notes)


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (nn.L1Loss(), nn.Identity()),
        (lambda outputs, targets: F.nll_loss(outputs, targets.argmax(1)), nn.LogSoftmax(1)),
        (lambda outputs, targets: -(outputs * targets).sum(1).mean(), nn.LogSoftmax(1)),
    ],
    ids=["absolute value", "likelihood", "likelihood by hand"],
)
def test_a_loss_that_is_linear_in_the_outputs_is_noted(loss: Any, last: nn.Module) -> None:
    """Its Gauss-Newton curvature is zero whatever the network is."""
    inputs, labels = images()
    targets = F.one_hot(labels, 3).float()
    (note,) = notes(trained(last), (inputs, targets), loss)
    assert "linear in the outputs" in note
    assert "NLLLoss" in note
    assert not notes(trained(last), (inputs, targets), lambda outputs, targets: F.mse_loss(outputs, targets))
