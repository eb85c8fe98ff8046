"""Layers of other libraries get a rule by what they compute, and the numbers are those of the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from cases import Case
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

import saltflat
from saltflat.layers import find_layer_rule

WIDTH, LENGTH, COUNT, CLASSES = 4, 3, 6, 3
F64 = torch.float64


class Own(nn.Module):
    """A layer of the user's own: parameters by name, and a function of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self._parameters.values())


def normalize(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


SQUARE = (WIDTH, WIDTH)
FOUND: dict[str, Callable[[], nn.Module]] = {
    "Conv1D": lambda: Conv1D(WIDTH, WIDTH),
    "transposed product": lambda: Own(lambda x, w, b: x @ w + b, weight=SQUARE, bias=(WIDTH,)),
    "product without bias": lambda: Own(lambda x, w: x @ w, weight=SQUARE),
    "product": lambda: Own(lambda x, w, b: x @ w.T + b, weight=SQUARE, bias=(WIDTH,)),
    "LlamaRMSNorm": lambda: LlamaRMSNorm(WIDTH),
    "norm with an offset": lambda: Own(lambda x, w: normalize(x) * (1 + w), scale=(WIDTH,)),
    "layer scale": lambda: Own(lambda x, w: x * w, gamma=(WIDTH,)),
    "branch of layer scale": lambda: Own(lambda x, w: x + w * x.tanh(), gamma=(WIDTH,)),
    "shift": lambda: Own(lambda x, b: x + b, shift=(WIDTH,)),
    "scale and shift": lambda: Own(lambda x, w, b: normalize(x) * w + b, weight=(WIDTH,), bias=(WIDTH,)),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "squared weights": lambda: Own(lambda x, w: x @ w.square(), weight=SQUARE),
    "symmetric weights": lambda: Own(lambda x, w: x @ (w + w.T), weight=SQUARE),
    "softplus of a scale": lambda: Own(lambda x, w: x * F.softplus(w), weight=(WIDTH,)),
    "scale of positions": lambda: Own(lambda x, w: x * w[: x.shape[-2], None], weight=(WIDTH,)),
    "bias added twice": lambda: Own(lambda x, w, b: x @ w + 2 * b, weight=SQUARE, bias=(WIDTH,)),
    "several parameters": lambda: Own(lambda x, w, b, c: x * w + b * c, weight=(WIDTH,), bias=(WIDTH,), c=(WIDTH,)),
}


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(2, WIDTH), middle, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.middle(self.first(x).tanh()).mean(1))
        return found


def make_case(middle: Callable[[], nn.Module]) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(middle()).double().eval()
        x, y = torch.randn(COUNT, LENGTH, 2, dtype=F64), torch.randint(CLASSES, (COUNT,))
        with torch.no_grad():
            for each in model.middle.parameters():
                each.add_(0.5 * torch.randn_like(each))
    return Case(model, [(x, y)], "cross_entropy", F.cross_entropy)


@pytest.mark.parametrize("name", FOUND)
def test_a_layer_gets_a_rule_by_what_it_computes(name: str) -> None:
    case = make_case(FOUND[name])
    assert find_layer_rule(case.model.get_submodule("middle")) is not None
    report = saltflat.measure(case.model, case.batches, measures="hessian_trace", progress=False)
    assert report.settings["strategy"] == "together"
    check_statistics(case, rel=1e-5 if name == "LlamaRMSNorm" else 1e-10)  # which computes in float32


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_computes_something_else_gets_none(name: str) -> None:
    case = make_case(OTHERS[name])
    assert find_layer_rule(case.model.get_submodule("middle")) is None
    check_statistics(case)


def check_statistics(case: Case, rel: float = 1e-10) -> None:
    names = {"curvature_diagonal": oracle.curvature_diagonal, "gradient_second_moment": oracle.gradient_second_moment}
    found = saltflat.compute_statistics(case.model, case.batches, names=list(names), progress=False)
    for statistic, define in names.items():
        for name, expected in define(case).items():
            off = (found[statistic][name] - expected).abs().max()
            assert off <= rel * expected.abs().max() + 1e-14, (statistic, name)


def test_layers_that_are_patched_parametrized_or_in_other_hands_get_none() -> None:
    patched: Any = Own(lambda x, w: x @ w, weight=SQUARE)
    patched.forward = lambda x: 2 * x
    assert find_layer_rule(patched) is None
    computed = nn.utils.parametrizations.weight_norm(Own(lambda x, w: x @ w, weight=SQUARE), "weight")
    assert find_layer_rule(computed) is None
    counting = Own(lambda x, w: x @ w, weight=SQUARE)
    counting.register_buffer("calls", torch.zeros(()))
    assert find_layer_rule(counting) is None
    failing = Own(lambda x, w: x[5], weight=SQUARE)
    assert find_layer_rule(failing) is None


def test_trying_a_layer_changes_nothing() -> None:
    layer = Own(lambda x, w: x @ w + torch.rand(1), weight=SQUARE)
    before, state = layer.weight, torch.get_rng_state()
    assert find_layer_rule(layer) is None
    assert layer.weight is before
    assert torch.equal(torch.get_rng_state(), state)


class Positions(nn.Module):
    """Adds a row of a table to each position; the positions are the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(x.shape[1])[None])
        return found


def test_positions_that_all_examples_share_are_swept_together() -> None:
    case = make_case(Positions)
    report = saltflat.measure(case.model, case.batches, measures="hessian_trace", progress=False)
    assert report.settings["strategy"] == "together"
    check_statistics(case)


class Squeezed(Positions):
    """Takes the first example's rows for all."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(torch.arange(x.shape[1])[None])
        found: Tensor = x + rows[:1].sum(0, keepdim=True) * len(rows)
        return found


def test_a_model_that_counts_the_rows_of_its_table_is_not_swept_together() -> None:
    case = make_case(Squeezed)
    check_statistics(case)
