"""Path norm and input margins: by hand, by listing every path, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from cases import Case, integers, problem, reals
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.errors import OptionError
from saltflat.results.report import Reading


def measure_one(name: str, model: nn.Module, inputs: Tensor, dtype: torch.dtype | None = None) -> Reading:
    labels = torch.zeros(len(inputs), dtype=torch.long)
    return saltflat.measure(model, [(inputs, labels)], measures=[name], certificate=False, dtype=dtype)[name]


def test_the_path_norm_sums_over_every_path_of_a_network() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    one, two, three = (model.get_parameter(f"{place}.weight").detach() for place in (0, 2, 4))
    first, second, last = (model.get_parameter(f"{place}.bias").detach() for place in (0, 2, 4))
    total = float(last.square().sum())
    for k, j in product(range(2), range(2)):
        total += float((three[k, j] * second[j]) ** 2)
        for i in range(3):
            total += float((three[k, j] * two[j, i] * first[i]) ** 2)
            total += sum(float((three[k, j] * two[j, i] * one[i, x]) ** 2) for x in range(2))
    assert measure_one("path_norm", model, torch.randn(4, 2).double()).value == pytest.approx(total, rel=1e-12)


class Residual(nn.Module):
    """x + W relu(V x), in place, behind a BatchNorm that can be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
        self.inner, self.outer = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu_()
        y = self.inner(x)
        y.relu_()
        x = x + self.outer(y)
        outputs: Tensor = self.head(0.5 * F.avg_pool2d(x, 2).flatten(1))
        return outputs


def test_a_shortcut_is_a_path_of_its_own() -> None:
    model = Residual().double().eval()
    with torch.no_grad():
        assert isinstance(model.norm.running_mean, Tensor)
        model.norm.running_mean.uniform_(-1, 1)
    x = torch.randn(3, 1, 2, 2).double()
    refused = measure_one("path_norm", model, x)
    assert math.isnan(refused.value)
    assert "BatchNorm" in refused.notes[0]
    folded = saltflat.fold(model, x)
    found = measure_one("path_norm", folded, x).value
    weights = {name: value.detach().square() for name, value in folded.named_parameters()}
    stem = weights["stem.weight"][:, 0, 0, 0] + weights["stem.bias"]
    # Every position of a 2 x 2 image sees all four through a 3 x 3 kernel, each by another entry.
    total = torch.zeros(2, dtype=torch.float64)
    for row, column in product(range(2), range(2)):
        kernel = weights["inner.weight"][:, :, 1 - row : 3 - row, 1 - column : 3 - column].sum((2, 3))
        total += stem + weights["outer.weight"][:, :, 0, 0] @ (kernel @ stem + weights["inner.bias"])
        total += weights["outer.bias"]
    expected = weights["head.weight"] @ (0.5 * total / 4) + weights["head.bias"]
    assert found == pytest.approx(float(expected.sum()), rel=1e-12)


class Function(nn.Module):
    """A linear layer, and what a function makes of it and its outputs."""

    def __init__(self, run: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(3, 3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.linear)


REFUSED: dict[str, tuple[Callable[[Tensor, nn.Linear], Tensor], str]] = {
    "a smooth activation": (lambda x, f: f(F.gelu(f(x))), "also computes gelu"),
    "attention": (
        lambda x, f: (f(x)[:, None] @ f(x)[:, :, None] @ f(x)[:, None])[:, 0],
        "multiplies activations by each other",
    ),
    "a gate": (lambda x, f: f(x) * f(x), "multiplies activations by each other"),
    "a quotient": (lambda x, f: 1 / (1 + f(x).relu()), "also computes reciprocal"),
    "a difference": (lambda x, f: f(x) - 1, "also computes sub"),
    "a negative constant": (lambda x, f: f(x) + torch.tensor([1.0, -1.0, 0.0]), "has negative constants"),
    "a negative factor": (lambda x, f: -2 * f(x), "has negative constants"),
    "normalized weights": (lambda x, f: F.linear(x, f.weight / f.weight.norm()), "computes the weights"),
    "LayerNorm": (lambda x, f: F.layer_norm(f(x), (3,)), "also computes native_layer_norm"),
    "a bounded activation": (lambda x, f: f(F.relu6(f(x))), "also computes hardtanh"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_network_whose_outputs_are_no_sums_over_paths_has_no_path_norm(why: str) -> None:
    run, message = REFUSED[why]
    reading = measure_one("path_norm", Function(run), torch.randn(4, 3))
    assert math.isnan(reading.value)
    assert message in reading.notes[0]


def test_a_path_norm_that_overflows_is_not_a_number() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1e6)
    x = torch.randn(4, 3)
    assert "overflows float32" in measure_one("path_norm", model, x).notes[0]
    assert measure_one("path_norm", model, x, dtype=torch.float64).value > 1e38


@pytest.mark.parametrize("ignored", [-100, 255])
def test_input_margins_of_a_linear_classifier_are_distances_to_its_planes(ignored: int) -> None:
    model = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -9.0]]))
    x = torch.tensor([[2.0, 0.0], [0.5, 0.0], [-1.0, 0.0], [0.25, 0.0]], dtype=torch.float64)
    # The third is misclassified, the fourth ignored. The planes: x = 0, or x = -9 y, at 1/sqrt(82) of x.
    labels = torch.tensor([0, 0, 0, ignored])
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    report = saltflat.measure(model, [(x, labels)], loss, ["input_margin", "input_margin(quantile=1.0)"])
    assert report["input_margin"].value == pytest.approx(0.5 / math.sqrt(82), rel=1e-12)
    assert report["input_margin"].details["misclassified"] == 1
    assert report["input_margin(quantile=1.0)"].value == pytest.approx(2 / math.sqrt(82), rel=1e-12)


def test_the_standard_error_of_an_input_margin_covers_what_other_examples_give() -> None:
    noise = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    whole = torch.randn(10_000, 4, generator=noise)
    truth = measure_one("input_margin", model, whole).value
    hits = []
    for part in whole.split(400):
        reading = measure_one("input_margin", model, part)
        assert reading.sampling_stderr is not None
        hits.append(abs(reading.value - truth) <= 1.96 * reading.sampling_stderr)
    assert 0.84 <= sum(hits) / len(hits) <= 1


def test_an_input_margin_needs_classes_and_a_slope() -> None:
    constant = nn.Linear(2, 3)
    nn.init.zeros_(constant.weight)
    with torch.no_grad():
        constant.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    assert "gradient by the input is zero" in measure_one("input_margin", constant, torch.randn(3, 2)).notes[0]
    regression: Case = problem(nn.Linear(4, 3), reals(9, 4), reals(9, 3), "mse")
    report = saltflat.measure(regression.model, regression.batches, regression.loss, ["input_margin"])
    assert "SquaredError" in report["input_margin"].notes[0]
    sequences = problem(nn.Linear(4, 3), reals(9, 5, 4), integers(3, 9, 5))
    report = saltflat.measure(sequences.model, sequences.batches, sequences.loss, ["input_margin"])
    assert "one class number per example" in report["input_margin"].notes[0]
    with pytest.raises(OptionError, match="from 0 to 1"):
        saltflat.measure(constant, [(torch.randn(3, 2), torch.zeros(3).long())], measures="input_margin(quantile=2)")
