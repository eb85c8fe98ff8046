"""Each factored rule against no rule at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES
from torch import nn
from torch.utils._pytree import tree_leaves

import saltflat
from saltflat import layers
from saltflat.gradients import DenseGradient, OuterProductGradient, base
from saltflat.gradients.base import ColumnLayout, FactoredGradient
from saltflat.layers import convolution, infer_geometry

NAMES = ["curvature_diagonal", "curvature_trace", "gradient_second_moment"]
NETS = {name: CASES[name] for name in CASES}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_rule_gives_what_the_generic_way_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = NETS[name]()
    ruled = saltflat.compute_statistics(case.model, case.batches, names=NAMES, loss=case.loss)
    monkeypatch.setattr(layers, "RULES", {})
    generic = saltflat.compute_statistics(case.model, case.batches, names=NAMES, loss=case.loss)
    for statistic in NAMES:
        largest = max(float(value.abs().max()) for value in generic[statistic].values())
        for parameter, value in generic[statistic].items():
            floor = 1e-15 * largest
            torch.testing.assert_close(
                ruled[statistic][parameter], value, rtol=1e-10, atol=max(1e-10 * float(value.abs().max()), floor)
            )


def test_every_rule_is_used_by_some_case() -> None:
    used = {type(module) for make in CASES.values() for module in make().model.modules()}
    missing = [kind.__name__ for kind in layers.RULES if not any(issubclass(each, kind) for each in used)]
    assert not missing


def test_a_subclass_with_its_own_forward_has_no_rule() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    assert layers.find_layer_rule(Doubled(2, 2)) is None
    assert layers.find_layer_rule(nn.Linear(2, 2)) is not None
    weights = Doubled(2, 3, bias=False).double(), nn.Linear(2, 3, bias=False).double()
    weights[1].weight.data = weights[0].weight.data * 2
    data = torch.randn(5, 2, dtype=torch.float64), torch.randint(3, (5,))
    doubled, plain = (
        saltflat.compute_statistics(net, data, names="curvature_diagonal")["curvature_diagonal"]["weight"]
        for net in weights
    )
    torch.testing.assert_close(doubled, 4 * plain)


def test_layers_that_see_a_subset_of_the_examples_are_not_confused() -> None:
    class Routed(nn.Module):
        """Every token goes to one of two experts by its values."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x.new_zeros(*x.shape[:2], 4)
            for number, expert in enumerate(self.experts):
                chosen = (x[..., 0] > 0) == bool(number)
                out[chosen] = expert(x[chosen])
            return out.mean(1)

    torch.manual_seed(4)
    net = Routed().double()
    x, y = torch.randn(24, 3, 3, dtype=torch.float64), torch.randint(4, (24,))  # some examples skip an expert
    whole = saltflat.compute_statistics(net, (x, y), names=NAMES)
    alone = saltflat.compute_statistics(net, [(x[n : n + 1], y[n : n + 1]) for n in range(24)], names=NAMES)
    for statistic in NAMES:
        for parameter in whole[statistic]:
            torch.testing.assert_close(whole[statistic][parameter], alone[statistic][parameter], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("residual_with_batch_norm", "together"),
        ("attention_by_hand", "together"),
        ("position_embedding_without_an_example_dimension", "together, expanded"),
        ("class_token_and_position_parameters", "together, expanded"),
        ("transformer_layer_with_examples_in_dimension_one", "mapped"),
        ("embedding_tied_by_a_functional_call", "together, expanded"),
        ("lstm_in_two_directions", "single"),
    ],
)
def test_a_model_is_swept_the_quickest_way_it_allows(name: str, way: str) -> None:
    case = CASES[name]()
    found = saltflat.compute_statistics(case.model, case.batches, names="curvature_trace", loss=case.loss)
    assert way in found.settings["strategy"].split(" + ")


WIDE: dict[str, Callable[[], convolution.Convolution]] = {
    "plain": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "strided and dilated": lambda: nn.Conv2d(8, 16, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 0)),
    "groups": lambda: nn.Conv2d(16, 16, 3, groups=2),
    "circular": lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
    "reflected": lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
    "one dimension": lambda: nn.Conv1d(8, 8, 3, padding=2, stride=2),
    "three dimensions": lambda: nn.Conv3d(8, 8, 2, padding=1),
    "a leftover at the edge": lambda: nn.Conv2d(8, 8, 2, stride=3),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("images", [1, 3])
def test_gradients_by_kernels_are_those_by_patches(name: str, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = WIDE[name]()
    module.double()
    x = torch.randn(
        5,
        images,
        module.in_channels,
        *[25 if name == "one dimension" else 9] * len(module.kernel_size),
        dtype=torch.float64,
    )
    y = module(x.flatten(0, 1)).unflatten(0, (5, images))
    g = torch.randn(1, *y.shape, dtype=torch.float64)
    if images == 1:  # as a batch of one example shows it
        assert convolution.is_kernel_faster(module, g)
    quick = convolution.factor_convolution(module, x, g)
    assert isinstance(quick["weight"], DenseGradient)
    monkeypatch.setattr(convolution, "is_kernel_faster", lambda module, g: False)
    slow = convolution.factor_convolution(module, x, g)
    assert isinstance(slow["weight"], OuterProductGradient)
    for key in ("weight", "bias"):
        torch.testing.assert_close(quick[key].to_dense(), slow[key].to_dense())


MANY = {
    "a quadratic kernel": lambda: nn.Conv2d(3, 5, 3, padding=1),
    "no bias": lambda: nn.Conv2d(2, 3, 3, bias=False),
    "strides and dilation": lambda: nn.Conv2d(2, 3, (3, 5), stride=(1, 2), padding=(0, 2), dilation=(2, 1)),
    "the same size, circular": lambda: nn.Conv2d(3, 4, 4, padding="same", padding_mode="circular"),
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_kernels_for_many_columns_compute_what_patches_do(
    name: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "KEPT_CPU", kept)
    monkeypatch.setattr(base, "CPU_PIECE", 500)  # several pieces of examples
    torch.manual_seed(0)
    module = MANY[name]()
    x = torch.randn(5, 1, module.in_channels, 14, 25)
    y = module(x.flatten(0, 1)).unflatten(0, (5, 1))
    g = torch.randn(4, *y.shape)

    def compute(forms: dict[str, FactoredGradient]) -> list[Any]:
        weight = forms["weight"]
        whole = [slice(0, 4)], [slice(0, 1), slice(1, 4)]
        unit = torch.arange(len(module.weight)).reshape(-1, 1, 1, 1).expand(module.weight.shape)
        part = weight.select_columns(slice(1, 3)).select_examples(slice(2, 5))
        return [
            forms["bias"].to_dense() if module.bias is not None else None,
            *(weight.compute_squared_norms(groups) for groups in whole),
            weight.sum_squares(),
            weight.compute_spread(ColumnLayout(2, 2, 1)),
            weight.sum_unit_squares(module.weight.detach(), unit, len(module.weight)),
            weight.compute_row_products(infer_geometry(module, module.weight.shape), None),
            weight.project(module.weight.detach()),
            weight.sum_weighted(torch.arange(20.0).reshape(4, 5)),
            part.sum_squares(),
            part.to_dense(),
            weight.add(weight).sum_squares(),
            weight.count_bytes(),
        ]

    quick = compute(convolution.factor_convolution(module, x, g))
    assert convolution.is_kernel_faster_for_columns(module, g)
    monkeypatch.setattr(convolution, "is_kernel_faster_for_columns", lambda module, g: False)
    double = module.double()
    slow = compute(convolution.factor_convolution(double, x.double(), g.double()))
    assert quick.pop() == tuple(size // 2 for size in slow.pop())
    for ours, exact in zip(tree_leaves(quick), tree_leaves(slow), strict=True):  # sums may cancel
        largest = 0.0 if exact is None else float(exact.abs().max())
        torch.testing.assert_close(ours, exact, check_dtype=False, rtol=0, atol=1e-5 * largest)
