"""The same function with the smallest trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import NETWORKS
from cases import CASES, Case, joined
from chains import CHAINS
from oracle import loss_at, outputs_of
from rank_oracle import inputs_of
from torch import Tensor, nn
from torch.testing import assert_close

import saltflat
from saltflat.errors import ModelError, OptionError, SaltflatError
from saltflat.symmetry.fold import fold
from saltflat.symmetry.group import RescalingKind

MINIMUM = {"layer": "minimum_sharpness", "unit": "minimum_unit_sharpness"}
WITH_NORMS = (
    "vgg_with_batch_norm",
    "resnet20_with_padded_shortcuts",
    "resnet18_with_convolutional_shortcuts",
    "preactivation_wide_resnet",
    "densenet_block",
    "mobilenet_like",
)


def folded(name: str) -> Callable[[], Case]:
    def built() -> Case:
        case = NETWORKS[name]()
        return replace(case, model=fold(case.model, inputs_of(case.batches[0])))

    return built


PROBLEMS: dict[str, Callable[[], Case]] = {
    **{name: build for name, build in NETWORKS.items() if name not in {*WITH_NORMS, "norms_without_eps"}},
    **{f"folded_{name}": folded(name) for name in WITH_NORMS},
}


def rebalanced(case: Case, kind: RescalingKind = "unit", **options: Any) -> Case:
    return replace(case, model=saltflat.rebalance(case.model, case.batches, case.loss, kind=kind, **options))


def value(case: Case, measure: str) -> float:
    return saltflat.measure(case.model, case.batches, case.loss, measure, certificate=False)[measure].value


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kind", MINIMUM)
def test_the_function_stays_and_the_trace_becomes_the_smallest(kind: RescalingKind, name: str) -> None:
    case = PROBLEMS[name]()
    before = weights(case.model)
    after = rebalanced(case, kind)
    x = inputs_of(joined(case.batches))
    assert_close(after.model(x), case.model(x), rtol=1e-9, atol=1e-11)
    smallest = value(case, MINIMUM[kind])
    assert value(after, "hessian_trace") == pytest.approx(smallest, rel=1e-6)
    assert value(after, MINIMUM[kind]) == pytest.approx(smallest, rel=1e-6)
    # The user's model is not the one that was changed.
    assert_close(weights(case.model), before, rtol=0, atol=0)
    assert after.model is not case.model
    assert type(after.model) is type(case.model)


@pytest.mark.parametrize("name", ["biased_mlp", "folded_resnet20_with_padded_shortcuts", "vit_block", "gated"])
@pytest.mark.parametrize("kind", MINIMUM)
def test_once_is_enough(kind: RescalingKind, name: str) -> None:
    once = rebalanced(PROBLEMS[name](), kind)
    assert_close(weights(rebalanced(once, kind).model), weights(once.model), rtol=1e-7, atol=0)


def test_all_networks_of_one_family_become_the_same() -> None:
    case = NETWORKS["biased_mlp"]()
    other = replace(case, model=saltflat.rescale(case.model, inputs_of(case.batches[0]), seed=5))
    assert_close(weights(rebalanced(other).model), weights(rebalanced(case).model), rtol=1e-7, atol=0)


def test_layers_have_one_factor_and_units_have_their_own() -> None:
    case = CHAINS["mlp_with_biases"]()
    by_layer, by_unit = (
        {name: new / case.model.get_parameter(name) for name, new in rebalanced(case, kind).model.named_parameters()}
        for kind in ("layer", "unit")
    )
    for name, ratio in by_layer.items():
        assert_close(ratio, ratio.flatten()[0].expand_as(ratio), rtol=1e-12, atol=0)
        assert bool((ratio != 1).all()) == (name != "4.bias")
    hidden = by_unit["0.bias"]
    assert len(set(hidden.tolist())) == len(hidden)
    assert_close(by_unit["0.weight"], hidden[:, None].expand(-1, 4), rtol=1e-12, atol=0)
    assert_close(by_unit["2.weight"], by_unit["2.bias"][:, None] / hidden, rtol=1e-12, atol=0)


def test_the_smallest_trace_is_flatter_along_every_random_direction_on_average() -> None:
    """By the loss alone: small steps of one length in random directions lift it less."""
    case = NETWORKS["lenet5"]()
    rises = []
    for each in (case, rebalanced(case)):
        parameters = {name: value.detach() for name, value in each.model.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        here, lift = loss_at(each, outputs_of(each, each.model, parameters)), 0.0
        for _ in range(20):
            step = {
                name: 1e-3 * torch.randn(value.shape, dtype=torch.float64, generator=generator)
                for name, value in parameters.items()
            }
            for sign in (-1, 1):
                there = {name: value + sign * step[name] for name, value in parameters.items()}
                lift += float(loss_at(each, outputs_of(each, each.model, there)) - here)
        rises.append(lift)
    assert 0 < rises[1] < rises[0]


# BatchNorm.


@pytest.mark.parametrize("kind", MINIMUM)
@pytest.mark.parametrize("name", WITH_NORMS)
def test_batch_norm_has_to_be_folded_first(name: str, kind: RescalingKind) -> None:
    case = NETWORKS[name]()
    before = weights(case.model)
    with pytest.raises(ModelError, match=r"but got .*running statistics of .* absorb any scale.* Try .*saltflat\.fold"):
        rebalanced(case, kind)
    assert_close(weights(case.model), before, rtol=0, atol=0)


def test_curvature_that_can_be_scaled_away_is_left_with_a_warning() -> None:
    case = CHAINS["mlp_with_biases"]()
    with torch.no_grad():
        case.model.get_parameter("2.weight")[:, 1] = 0
    with pytest.warns(UserWarning, match=r"smaller without bound: the curvature of 2\.weight"):
        after = rebalanced(case)
    x = inputs_of(joined(case.batches))
    assert_close(after.model(x), case.model(x), rtol=1e-9, atol=1e-11)
    assert value(case, "minimum_unit_sharpness") < value(after, "hessian_trace") < value(case, "hessian_trace")
    # The weights out of the unit are zero, and those into it stay.
    assert_close(after.model.get_parameter("0.weight")[1], case.model.get_parameter("0.weight")[1], rtol=0, atol=0)


# Kinds of data, models and options.


@pytest.mark.parametrize("kind", ["layers", "", None, 3])
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    case = CHAINS["mlp_with_biases"]()
    with pytest.raises(OptionError, match=rf"Expected 'unit' or 'layer', but got kind={re.escape(repr(kind))}\. Try"):
        rebalanced(case, kind)


@pytest.mark.parametrize(
    "name", ["dict_batches_and_an_output_object", "inputs_by_name", "bilinear_layer_of_two_inputs"]
)
def test_inputs_of_every_kind_will_do(name: str) -> None:
    case = CASES[name]()
    after = rebalanced(case)
    for batch in case.batches:
        inputs = inputs_of(batch)
        old, new = (each.model(**inputs) if isinstance(inputs, dict) else each.model(*inputs) for each in (case, after))
        assert_close(getattr(new, "logits", new), getattr(old, "logits", old), rtol=1e-9, atol=1e-11)
    assert value(after, "hessian_trace") == pytest.approx(value(case, "minimum_unit_sharpness"), rel=1e-6)


@pytest.mark.parametrize("name", ["squared_error", "binary_cross_entropy", "class_weights", "custom_convex_loss"])
def test_losses_of_every_kind_will_do(name: str) -> None:
    case = CASES[name]()
    after = rebalanced(case)
    assert value(after, "hessian_trace") == pytest.approx(value(case, "minimum_unit_sharpness"), rel=1e-6)
    assert value(after, "hessian_trace") < 0.999 * value(case, "hessian_trace")


def test_single_precision_stays_single_and_is_as_exact_as_its_rounding() -> None:
    case = NETWORKS["lenet5"]()
    case.model.float()
    data = [(x.float(), y) for x, y in case.batches if isinstance(x, Tensor)]
    after = saltflat.rebalance(case.model, data)
    assert {each.dtype for each in after.parameters()} == {torch.float32}
    x = torch.cat([x for x, _ in data])
    # Every new weight is rounded, to 6e-8 of itself. Found: 1e-7 in the outputs, 6e-8 in the trace.
    outputs = case.model(x)
    assert float((after(x) - outputs).detach().abs().max()) < 1e-6 * float(outputs.detach().abs().max())
    found = saltflat.measure(case.model, data, measures="minimum_unit_sharpness", dtype=torch.float64)
    there = saltflat.measure(after, data, measures="hessian_trace", dtype=torch.float64)
    assert there["hessian_trace"].value == pytest.approx(found["minimum_unit_sharpness"].value, rel=1e-6)


@pytest.mark.parametrize("kind", MINIMUM)
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("biased_mlp", ["0.weight"]),
        ("lenet5", ["conv1.bias", "fc3.weight"]),
        ("gpt_like_decoder", ["block.c_fc.weight", "ln_f.bias"]),
        ("folded_vgg_with_batch_norm", ["features.0.weight"]),
    ],
)
def test_frozen_parameters_stay_bit_for_bit(name: str, frozen: list[str], kind: RescalingKind) -> None:
    case = PROBLEMS[name]()
    for each in frozen:
        case.model.get_parameter(each).requires_grad_(False)
    after = rebalanced(case, kind)
    for each, new in after.model.named_parameters():
        assert new.requires_grad == (each not in frozen)
        if each in frozen:
            assert torch.equal(new, case.model.get_parameter(each))
    assert value(after, "hessian_trace") == pytest.approx(value(case, MINIMUM[kind]), rel=1e-6)
    assert value(after, "hessian_trace") < 0.9999 * value(case, "hessian_trace")


def test_the_mode_is_kept_and_dropout_plays_no_part() -> None:
    case = folded("vgg_with_batch_norm")()
    wanted = weights(rebalanced(case).model)
    case.model.train()
    after = rebalanced(case)
    assert case.model.training
    assert all(module.training for module in after.model.modules())
    assert_close(weights(after.model), wanted, rtol=0, atol=0)


def test_random_columns_come_near() -> None:
    case = NETWORKS["biased_mlp"]()
    near = value(rebalanced(case, columns="sampled:64"), "hessian_trace")
    smallest, whole = value(case, "minimum_unit_sharpness"), value(case, "hessian_trace")
    assert smallest < near < smallest + 0.2 * (whole - smallest)


def test_a_network_without_rescalings_comes_back_as_it_was() -> None:
    case = NETWORKS["gelu_only"]()
    assert_close(weights(rebalanced(case).model), weights(case.model), rtol=0, atol=0)


def test_no_smallest_trace_where_curvatures_are_negative() -> None:
    case = CHAINS["mlp_with_biases"]()
    concave = replace(case, loss=lambda outputs, targets: -nn.functional.cross_entropy(outputs, targets))
    with pytest.raises(SaltflatError, match="negative"):
        rebalanced(concave)


def test_gradients_of_the_model_are_left_alone() -> None:
    case = CHAINS["mlp_with_biases"]()
    case.model(inputs_of(case.batches[0])).square().sum().backward()
    kept = [each.grad for each in case.model.parameters() if each.grad is not None]
    copies = deepcopy(kept)
    rebalanced(case)
    assert len(kept) == 6
    assert all(each.grad is grad for each, grad in zip(case.model.parameters(), kept, strict=True))
    assert_close(kept, copies, rtol=0, atol=0)
