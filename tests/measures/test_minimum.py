"""Minimum sharpness of any network: the infimum itself, its laws, and what it says where nothing reaches it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from architectures import NETWORKS
from cases import CASES, Case, integers, joined, problem, reals
from chains import CHAINS, weights_and_biases
from minimum_oracle import least_trace
from rank_oracle import inputs_of
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

import saltflat
from saltflat.measures.minimum import minimum_sharpness, minimum_unit_sharpness
from saltflat.results import Reading
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.fold import fold
from saltflat.symmetry.group import RescalingKind

MINIMUM = {"layer": "minimum_sharpness", "unit": "minimum_unit_sharpness"}
NAMES = [*MINIMUM.values(), "hessian_trace"]


def folded(build: Callable[[], Case]) -> Callable[[], Case]:
    def built() -> Case:
        case = build()
        return replace(case, model=fold(case.model, inputs_of(case.batches[0])))

    return built


WITH_NORMS = [n for n, build in NETWORKS.items() if any(isinstance(m, _BatchNorm) for m in build().model.modules())]
PROBLEMS = {**NETWORKS, **{f"folded_{name}": folded(NETWORKS[name]) for name in WITH_NORMS}}
ENDLESS = {*WITH_NORMS, "norms_without_eps"}


@cache
def problem_named(name: str) -> Case:
    return PROBLEMS[name]()


@cache
def readings_of(name: str) -> dict[str, Reading]:
    return measured(problem_named(name))


def measured(case: Case, **options: Any) -> dict[str, Reading]:
    report = saltflat.measure(case.model, case.batches, case.loss, NAMES, certificate=False, **options)
    return {name: report[name] for name in NAMES}


# The infimum, on all networks.


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kind", MINIMUM)
def test_it_is_the_infimum_over_all_free_scales(kind: str, name: str) -> None:
    reading, least = readings_of(name)[MINIMUM[kind]], least_trace(problem_named(name), kind)
    assert reading.converged
    assert reading.exact
    assert reading.value == pytest.approx(least.value, rel=1e-10)
    assert reading.details["attained"] == least.attained == (name not in ENDLESS)
    assert sum(reading.layers.values()) == pytest.approx(reading.value, rel=1e-12)
    for layer, share in least.layers.items():
        assert reading.layers[layer] == pytest.approx(share, abs=1e-8 * least.value)
    # Going downhill leads there and no further, whether or not there is a place where it ends.
    assert reading.value * (1 - 1e-12) <= least.reached <= reading.value * (1 + 1e-8)


# Of these the oracle cannot tell: the first norm has no eps to speak of, the second hides all of a random example; the
# last has negative curvatures, and so no minimum.
UNTOLD = {"rms_norm", "dict_batches_and_an_output_object", "custom_loss_with_an_indefinite_output_hessian"}
# The oracle finds the null space by mapping the model over many weights, which torch does not do for these.
UNMAPPED = {
    "checkpointed_functions",
    "embedding_with_sparse_gradients",
    "embedding_with_sparse_gradients_before_a_weight_set_by_its_parent",
    "gradient_inside_of_the_forward_pass",
    "instance_norm_before_channels_last",
}


# The oracle draws many weights at once, which torch is slow at for some operations, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNTOLD | UNMAPPED])
def test_it_is_the_infimum_for_every_layer_input_and_loss(name: str) -> None:
    case = CASES[name]()
    found = measured(case)
    for kind, measure in MINIMUM.items():
        least = least_trace(case, kind)
        assert found[measure].value == pytest.approx(least.value, rel=1e-10)
        assert found[measure].details["attained"] == least.attained


@pytest.mark.parametrize("name", PROBLEMS)
def test_more_freedom_is_never_worse(name: str) -> None:
    by_unit, by_layer, trace = (readings_of(name)[each].value for each in ("minimum_unit_sharpness", *NAMES[::2]))
    assert 0 < by_unit <= by_layer * (1 + 1e-12)
    assert by_layer <= trace * (1 + 1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    ("kind", "measures"), [("layer", list(MINIMUM.values())), ("unit", ["minimum_unit_sharpness"])]
)
def test_rescaling_does_not_change_what_is_the_smallest(
    kind: RescalingKind, measures: Sequence[str], name: str
) -> None:
    case = problem_named(name)
    for seed in (2, 3):
        model = saltflat.rescale(case.model, inputs_of(case.batches[0]), seed, kind=kind)
        report = saltflat.measure(model, case.batches, case.loss, measures, certificate=False)
        for each in measures:
            assert report[each].value == pytest.approx(readings_of(name)[each].value, rel=1e-6)
            assert report[each].details["attained"] == readings_of(name)[each].details["attained"]


@pytest.mark.parametrize("name", sorted(PROBLEMS.keys() - ENDLESS))
def test_the_factors_it_tells_lead_there(name: str) -> None:
    case, reading = problem_named(name), readings_of(name)["minimum_sharpness"]
    model = deepcopy(case.model)
    with torch.no_grad():
        for layer, factor in reading.details["scales"].items():
            model.get_parameter(layer).mul_(factor)
    x = inputs_of(joined(case.batches))
    assert_close(model(x), case.model(x), rtol=1e-9, atol=1e-11)
    there = measured(replace(case, model=model))["hessian_trace"]
    assert there.value == pytest.approx(reading.value, rel=1e-9)
    assert dict(there.layers) == pytest.approx(dict(reading.layers), rel=1e-6)


# Chains.


@pytest.mark.parametrize("name", [name for name in CHAINS if name.endswith("without_biases")])
def test_a_chain_without_biases_has_the_closed_form(name: str) -> None:
    case = CHAINS[name]()
    traces = [float(trace) for trace in oracle.curvature_trace(case).values()]
    closed = len(traces) * math.prod(traces) ** (1 / len(traces))
    reading = measured(case)["minimum_sharpness"]
    assert reading.value == pytest.approx(closed, rel=1e-10)
    assert list(reading.layers.values()) == pytest.approx([closed / len(traces)] * len(traces), rel=1e-8)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_with_biases_is_the_convex_program_of_its_layers(name: str) -> None:
    case = CHAINS[name]()
    traces = {key: float(value) for key, value in oracle.curvature_trace(case).items()}
    layers = weights_and_biases(case.model)
    reading = measured(case)["minimum_sharpness"]
    scales = reading.details["scales"]
    assert math.prod(scales[weight] for weight, _ in layers) == pytest.approx(1, rel=1e-12)
    so_far = np.cumprod([scales[weight] for weight, _ in layers])
    for (_, bias), factor in zip(layers, so_far, strict=True):
        assert bias is None or scales[bias] == pytest.approx(factor, rel=1e-12)
    shares = {key: trace * scales[key] ** -2 for key, trace in traces.items()}
    assert reading.value == pytest.approx(sum(shares.values()), rel=1e-10)
    # Stationary: growing one layer and shrinking the next gains nothing. A convex program has no other such place.
    for (weight, bias), (following, _) in pairwise(layers):
        lifted = shares[weight] + (shares[bias] if bias else 0)
        assert lifted == pytest.approx(shares[following], rel=1e-8)


# What stays fixed.

FROZEN = (
    "biased_mlp",
    "vgg_with_batch_norm",
    "resnet18_with_convolutional_shortcuts",
    "folded_resnet20_with_padded_shortcuts",
    "folded_densenet_block",
    "gpt_like_decoder",
    "tied_embedding_decoder",
    "prelu_and_leaky",
)


def some_of(case: Case) -> list[str]:
    """About one parameter of five, as frozen backbones and single layers are."""
    names = [name for name, _ in case.model.named_parameters()]
    return [name for number, name in enumerate(names) if number % 5 == 1]


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("kind", MINIMUM)
def test_frozen_parameters_stay_as_they_are(kind: str, name: str) -> None:
    case = PROBLEMS[name]()
    frozen = some_of(case)
    for each in frozen:
        case.model.get_parameter(each).requires_grad_(False)
    found, least = measured(case), least_trace(case, kind)
    reading = found[MINIMUM[kind]]
    assert reading.value == pytest.approx(least.value, rel=1e-10)
    assert reading.value < 0.999 * found["hessian_trace"].value, "some scales are left"
    assert reading.details["attained"] == least.attained
    assert not reading.layers.keys() & set(frozen)


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("kind", MINIMUM)
def test_parameters_that_are_not_measured_stay_as_they_are(kind: str, name: str) -> None:
    case = PROBLEMS[name]()
    left = some_of(case)
    chosen = [each for each, _ in case.model.named_parameters() if each not in left]
    reading = measured(case, layers=chosen)[MINIMUM[kind]]
    for each in left:
        case.model.get_parameter(each).requires_grad_(False)
    assert reading.value == pytest.approx(least_trace(case, kind).value, rel=1e-10)
    assert set(reading.layers) == set(chosen)


def test_frozen_biases_of_all_hidden_units_leave_nothing_to_rescale() -> None:
    case = PROBLEMS["gated"]()
    case.model.get_parameter("w12.bias").requires_grad_(False)
    found = measured(case)
    for each in MINIMUM.values():
        assert found[each].value == pytest.approx(found["hessian_trace"].value, rel=1e-12)
        assert any("no rescaling" in note for note in found[each].notes)


# Nothing to rescale, and nothing that reaches the infimum.


@pytest.mark.parametrize("name", ["gelu_only", "no_symmetry"])
def test_without_rescalings_it_is_the_trace_and_says_so(name: str) -> None:
    found = readings_of(name)
    for each in MINIMUM.values():
        assert found[each].value == pytest.approx(found["hessian_trace"].value, rel=1e-12)
        assert found[each].details["attained"]
        assert any("no rescaling" in note for note in found[each].notes)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in ENDLESS | {"gelu_only", "no_symmetry"}])
def test_there_is_nothing_to_say_of_a_minimum_that_some_weights_have(name: str) -> None:
    assert not readings_of(name)["minimum_unit_sharpness"].notes


@pytest.mark.parametrize("name", MINIMUM.values())
def test_batch_norm_takes_the_blame_and_folding_is_suggested(name: str) -> None:
    reading = readings_of("vgg_with_batch_norm")[name]
    (note,) = reading.notes
    assert "features.0.weight" in note
    assert "running statistics of features.1, features.5 absorb any scale" in note
    assert "saltflat.fold(model)" in note
    assert reading.layers["features.0.weight"] == 0
    after = readings_of("folded_vgg_with_batch_norm")[name]
    assert after.details["attained"]
    assert after.layers["features.0.weight"] > 0
    assert after.value > reading.value


def test_norms_that_undo_any_scale_are_not_to_be_folded() -> None:
    for name in MINIMUM.values():
        (note,) = readings_of("norms_without_eps")[name].notes
        assert "0.weight" in note
        assert "normalizations that undo any scale" in note
        assert "fold" not in note


def mlp(activation: type[nn.Module] = nn.ReLU) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 3))
        return problem(model, reals(12, 4), integers(3, 12))


def without_unit(case: Case, unit: int) -> Case:
    """The same network without one of its first hidden units."""
    small = nn.Sequential(*deepcopy(case.model).children())
    keep = [i for i in range(6) if i != unit]
    with torch.no_grad():
        for name, index in (("0.weight", (keep,)), ("0.bias", (keep,)), ("2.weight", (slice(None), keep))):
            layer, _, key = name.partition(".")
            setattr(small.get_submodule(layer), key, nn.Parameter(case.model.get_parameter(name)[index].clone()))
    return replace(case, model=small)


def test_a_dead_unit_adds_nothing() -> None:
    case = mlp()
    with torch.no_grad():
        case.model.get_parameter("0.bias")[2] = -100
    found, smaller = measured(case), measured(without_unit(case, 2))
    for name in MINIMUM.values():
        assert found[name].value == pytest.approx(smaller[name].value, rel=1e-12)
        assert found[name].details["attained"]


def no_way_out(case: Case) -> None:
    case.model.get_parameter("2.weight")[:, 2] = 0


def no_way_in(case: Case) -> None:
    case.model.get_parameter("0.weight")[2] = 0
    case.model.get_parameter("0.bias")[2] = 0


@pytest.mark.parametrize(
    ("activation", "cut", "lost"),
    [(nn.ReLU, no_way_out, ["2.weight"]), (nn.LeakyReLU, no_way_in, ["0.weight", "0.bias"])],
    ids=["no way out", "no way in"],
)
def test_a_unit_with_weights_of_zero_on_one_side_loses_the_curvature_of_the_other(
    activation: type[nn.Module], cut: Callable[[Case], None], lost: Sequence[str]
) -> None:
    case = mlp(activation)
    with torch.no_grad():
        cut(case)
    reading = measured(case)["minimum_unit_sharpness"]
    least = least_trace(case, "unit")
    assert reading.value == pytest.approx(least.value, rel=1e-10)
    assert reading.value == pytest.approx(measured(without_unit(case, 2))["minimum_unit_sharpness"].value, rel=1e-10)
    assert not reading.details["attained"]
    assert reading.value < least.reached <= reading.value * (1 + 1e-8)
    (note,) = reading.notes
    assert f"the curvature of {', '.join(lost)} can be scaled away" in note
    assert "weights of exactly zero" in note
    # All units with one factor: what that one loses the others need.
    assert measured(case)["minimum_sharpness"].details["attained"]


def test_a_last_layer_of_zeros_leaves_the_curvature_of_its_bias() -> None:
    case = mlp()
    with torch.no_grad():
        case.model.get_parameter("4.weight").zero_()
    for name in MINIMUM.values():
        reading = measured(case)[name]
        assert reading.value == pytest.approx(float(oracle.curvature_trace(case)["4.bias"]), rel=1e-12)
        assert not reading.details["attained"]
        assert any("4.weight can be scaled away" in note for note in reading.notes)


# Estimates and things that have no value.


def test_no_minimum_over_negative_curvatures() -> None:
    case = mlp()
    concave = replace(case, loss=lambda outputs, targets: -nn.functional.cross_entropy(outputs, targets))
    for name in MINIMUM.values():
        reading = measured(concave)[name]
        assert math.isnan(reading.value)
        assert any("negative" in note and "no minimum" in note for note in reading.notes)


def test_one_negative_curvature_is_enough() -> None:
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    group = find_symmetries(net, torch.randn(2, 1))
    diagonal = {"0.weight": torch.tensor([[1.0], [-1e-3]]), "2.weight": torch.tensor([[16.0, 4.0]])}
    assert math.isnan(minimum_unit_sharpness(diagonal, group).value)
    traces = {"0.weight": torch.tensor(-1e-3), "2.weight": torch.tensor(20.0)}
    assert math.isnan(minimum_sharpness(traces, group).value)


@pytest.mark.parametrize("diagonal", ["finite_difference", "hutchinson"])
def test_an_estimated_diagonal_makes_an_estimate(diagonal: str) -> None:
    found = measured(mlp(), diagonal=diagonal)
    reading = found["minimum_unit_sharpness"]
    assert math.isfinite(reading.value)
    assert reading.stderr is not None
    assert not reading.exact
    assert any("estimate" in note for note in reading.notes)
    # Traces come from the sweep all the same.
    assert found["minimum_sharpness"].exact


@pytest.mark.parametrize("name", MINIMUM.values())
def test_random_columns_give_it_an_error(name: str) -> None:
    exact, found = readings_of("biased_mlp")[name], measured(problem_named("biased_mlp"), columns="sampled:8")[name]
    assert found.stderr is not None
    assert not found.exact
    assert 0 < abs(found.value - exact.value) < 4 * found.stderr < exact.value


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if x.sum() > 1e9:
            x = x / 2
        out: Tensor = self.last(x)
        return out


class OutsideOfTorch(nn.Module):
    """Divides by numbers that torch does not see being made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).abs()
        largest = torch.as_tensor(hidden.detach().numpy().max(1, keepdims=True))
        found: Tensor = self.last(hidden / largest)
        return found


def test_what_leaves_torch_on_the_way_is_noticed() -> None:
    torch.manual_seed(0)
    model, data = OutsideOfTorch().double(), (torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,)))
    report = saltflat.measure(model, data, measures=list(MINIMUM.values()), certificate=False)
    for name in MINIMUM.values():
        assert math.isnan(report[name].value)
        assert "cannot be traced" in report[name].notes[0]


def test_a_model_that_cannot_be_watched_has_no_minimum_and_the_reason_is_told() -> None:
    case = problem(Branching(), reals(12, 4), integers(3, 12))
    found = measured(case)
    report = saltflat.measure(case.model, case.batches, certificate=False)
    for name in MINIMUM.values():
        assert math.isnan(found[name].value)
        (note,) = found[name].notes
        assert note == report.left_out[name]
        assert "if x.sum() > 1e9" in note
        assert "torch.where" in note
    assert math.isfinite(found["hessian_trace"].value)


@pytest.mark.parametrize("name", ["folded_vgg_with_batch_norm", "vgg_with_batch_norm", "gelu_only", "vit_block"])
def test_what_it_tells_is_plain_numbers(name: str) -> None:
    case = problem_named(name)
    report = saltflat.measure(case.model, case.batches, measures=NAMES, certificate=False)
    again = saltflat.Report.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False)))
    assert again == report
    scales = again["minimum_sharpness"].details["scales"]
    assert set(scales) == {each for each, _ in case.model.named_parameters()}
    assert all(isinstance(factor, float) and 0 < factor < math.inf for factor in scales.values())
    assert isinstance(again["minimum_sharpness"].details["attained"], bool)
    group = find_symmetries(case.model, inputs_of(case.batches[0]))
    assert again["minimum_unit_sharpness"].details["independent_scales"] == group.scales
