"""Ready-made networks: their sizes, their first weights, and that they can be measured."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import SHRUNK, examples

import saltflat
from saltflat.errors import ModelError, OptionError, UnknownNameError
from saltflat.studies.networks import NETWORKS, find_network
from saltflat.studies.recipe import Recipe
from saltflat.studies.training.build import build_network
from saltflat.studies.training.dropout import Dropout

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
# From the papers' tables and from sums by hand: weights and biases of convolutions (out * in * k * k + out) and of
# linear layers, and two numbers for each normalized channel.
SIZES = {
    "lenet5": (CIFAR, (6 * 75 + 6) + (16 * 150 + 16) + (120 * 400 + 120) + (84 * 120 + 84) + 850),
    "ibayashi_mlp": (MNIST, (512 * 784 + 512) + (128 * 512 + 128) + (512 * 128 + 512) + (10 * 512 + 10)),
    "petzka_mlp": (MNIST, (50 * 784 + 50) + 2 * (50 * 50 + 50) + (30 * 50 + 30) + (10 * 30 + 10)),
    "ibayashi_lenet": (MNIST, 156 + (16 * 150 + 16) + (120 * 400 + 120) + (84 * 5880 + 84) + 850),
    "cnn6": (CIFAR, 1792 + 36928 + 73856 + 147584 + (192 * 1152 + 192) + (192 * 1728 + 192) + 1930),
    # 0.27 million in He et al.; the shortcuts here are convolutions, 16 * 32 + 32 * 64 more.
    "resnet20": (CIFAR, 432 + 13824 + 50688 + 202752 + 2560 + 2 * (7 * 16 + 6 * 32 + 5 * 64 + 64) + 650),
    "wrn_16_4": (CIFAR, 2_748_890),
    "wrn_28_2": (CIFAR, 1_467_610),
    "densenet_bc": (CIFAR, 769_162),  # 0.8 million in Huang et al., Table 2
}


def numbers(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_a_network_has_as_many_numbers_as_its_paper_says(name: str) -> None:
    shape, wanted = SIZES[name]
    assert numbers(build_network(Recipe(network=name), shape, 10)) == wanted


@pytest.mark.parametrize(
    ("growth", "depth", "compression", "classes"), [(12, 100, 0.5, 10), (4, 22, 1.0, 7), (3, 16, 0.4, 2)]
)
def test_a_densenet_has_the_numbers_of_its_definition(
    growth: int, depth: int, compression: float, classes: int
) -> None:
    """Three blocks of (depth - 4) / 6 layers: BatchNorm, 1 x 1 to 4 k, BatchNorm, 3 x 3 to k, and k more channels."""
    width = 2 * growth
    wanted = 3 * 3 * 3 * width
    for block in (1, 2, 3):
        for _ in range((depth - 4) // 6):
            wanted += 2 * width + width * 4 * growth + 2 * 4 * growth + 9 * 4 * growth * growth
            width += growth
        wanted += 2 * width  # the BatchNorm of the transition, or the last one
        if block < 3:
            wanted += width * int(width * compression)
            width = int(width * compression)
    wanted += width * classes + classes
    architecture = {"growth": growth, "depth": depth, "compression": compression}
    model = build_network(Recipe(network="densenet_bc", architecture=architecture), CIFAR, classes)
    assert numbers(model) == wanted
    layers = [each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth
    assert sum(isinstance(each, Dropout) for each in model.modules()) == depth - 2  # not after the first and the last


def test_a_dense_layer_keeps_its_input_and_appends_channels() -> None:
    model = build_network(Recipe(network="densenet_bc", architecture={"growth": 3, "depth": 10}), (2, 8, 8), 3)
    x = torch.randn(2, 6, 8, 8)
    layer = model[1]  # type: ignore[index]
    assert layer(x).shape == (2, 9, 8, 8)
    assert torch.equal(layer(x)[:, :6], x)


def test_every_network_is_shrunk_in_the_tests() -> None:
    assert set(SHRUNK) == set(NETWORKS) == {*SIZES, "mlp"}


def test_an_mlp_is_made_by_widths_or_by_width_and_depth() -> None:
    def widths(**architecture: Any) -> list[int]:
        model = build_network(Recipe(architecture=architecture), (4, 4), 3)
        return [each.out_features for each in model.modules() if isinstance(each, nn.Linear)]

    assert widths() == [64, 64, 3]
    assert widths(widths=[9, 8]) == [9, 8, 3]
    assert widths(width=5, depth=3) == [5, 5, 5, 3]
    assert widths(widths=[]) == [3]


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 17, 20)])
def test_lenet5_takes_images_of_any_size(shape: tuple[int, ...]) -> None:
    assert build_network(Recipe(network="lenet5"), shape, 10)(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", SHRUNK)
def test_saltflat_can_measure_and_rescale_a_ready_made_network(name: str) -> None:
    data = examples((2, 16, 16), train=4)
    recipe = Recipe(network=name, architecture=SHRUNK[name], dtype="float64")
    model = build_network(recipe, data.shape, data.classes)
    batch = (data.train_inputs.double(), data.train_labels)
    measures = ["hessian_trace", "normalized_sharpness"]
    report = saltflat.measure(model, batch, measures=measures, progress=False)
    assert all(math.isfinite(report[each].value) and report[each].value > 0 for each in measures)
    found = saltflat.find_symmetries(model, batch[0])
    assert found.scales > 0
    # BatchNorm's epsilon keeps its channels from being scaled freely; nothing else is in the way.
    assert not found.obstacles or any(isinstance(each, nn.BatchNorm2d) for each in model.modules())
    folded = saltflat.fold(model)
    torch.testing.assert_close(folded(batch[0]), model(batch[0]))
    assert not any(isinstance(each, nn.BatchNorm2d) for each in folded.modules())


@pytest.mark.parametrize("name", SHRUNK)
def test_arguments_of_a_network_have_defaults_and_are_passed_on(name: str) -> None:
    parameters = inspect.signature(NETWORKS[name].make).parameters
    assert list(parameters)[:2] == ["shape", "classes"]
    assert list(NETWORKS[name].arguments) == list(parameters)[2:]
    assert inspect.Parameter.empty not in NETWORKS[name].arguments.values()
    small, large = (
        build_network(Recipe(network=name, architecture=each), (2, 16, 16), 3)
        for each in (SHRUNK[name], dict[str, Any]())
    )
    assert numbers(small) < numbers(large)


def test_first_weights_depend_on_the_seed_alone_and_leave_the_random_state() -> None:
    recipe = Recipe(network="lenet5", seed=3)
    state = torch.get_rng_state()
    first = build_network(recipe, CIFAR, 10)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    again = build_network(replace(recipe, lr=1.0, batch_size=3, label_noise=0.5, dropout=0.5), CIFAR, 10)
    other = build_network(replace(recipe, seed=4), CIFAR, 10)
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
        assert not torch.equal(other.state_dict()[name], value)
    assert not first.training


def test_a_float64_network_starts_from_the_same_numbers() -> None:
    single = build_network(Recipe(), (6,), 3).state_dict()
    double = build_network(Recipe(dtype="float64"), (6,), 3).state_dict()
    for name, value in single.items():
        assert double[name].dtype is torch.float64
        assert torch.equal(double[name], value.double())


# The variance of a weight (300 in, 200 out), from the definitions.
VARIANCES = {
    "xavier_normal": 2 / 500,
    "xavier_uniform": 2 / 500,
    "kaiming_normal": 2 / 300,
    "kaiming_uniform": 2 / 300,
    "normal": 1.0,
    "uniform": 1 / 3,
}


@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("scheme", VARIANCES)
def test_an_initialisation_has_the_variance_of_its_definition(scheme: str, scale: float) -> None:
    recipe = Recipe(init=scheme, init_scale=scale, architecture={"widths": (200,)})
    layer = build_network(recipe, (300,), 10).requires_grad_(False)[1]  # type: ignore[index]
    variance = VARIANCES[scheme] * scale**2
    assert float(layer.weight.var()) == pytest.approx(variance, rel=0.03)
    assert float(layer.weight.mean()) == pytest.approx(0, abs=5 * math.sqrt(variance / 60000))
    assert not layer.bias.any()
    bounded = float(layer.weight.abs().max()) <= math.sqrt(3 * variance) * (1 + 1e-6)
    assert bounded == ("uniform" in scheme)


def test_the_networks_own_initialisation_can_be_scaled() -> None:
    plain, scaled = (build_network(Recipe(init_scale=scale), (6,), 3).state_dict() for scale in (1.0, 3.0))
    torch.testing.assert_close(scaled["1.weight"], 3 * plain["1.weight"])
    assert torch.equal(scaled["1.bias"], plain["1.bias"])


def test_batch_norm_is_not_touched_by_an_initialisation() -> None:
    model = build_network(Recipe(network="resnet20", architecture={"width": 2}, init="uniform"), (2, 8, 8), 3)
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    assert len(norms) == 19
    assert all(bool((norm.weight == 1).all()) and not norm.bias.any() for norm in norms)


def test_dropout_is_the_identity_without_a_mask_and_in_eval_mode() -> None:
    layer, x = Dropout(), torch.randn(4, 5)
    assert torch.equal(layer.train()(x), x)
    layer.mask = torch.zeros(4, 5)
    assert torch.equal(layer(x), torch.zeros(4, 5))
    assert torch.equal(layer.eval()(x), x)
    assert not layer.state_dict()


def test_the_users_own_function_makes_a_network() -> None:
    assert find_network("training_cases:noisy").arguments == {"share": 0.5}
    model = build_network(Recipe(network="training_cases:noisy", architecture={"share": 0.25}), (6,), 3)
    assert model[2].p == 0.25  # type: ignore[index]


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ({"depth": 50}, r"Expected a depth of 6 n \+ 4 .*got depth=50 .*Try depth=52"),
        ({"depth": 4}, r"got depth=4 .*Try depth=10"),
        ({"growth": 0}, "got growth=0"),
        ({"compression": 0.0}, "got compression=0.0"),
        ({"compression": 1.5}, "got compression=1.5"),
        ({"depth": "deep"}, "for the network 'densenet_bc'"),
    ],
)
def test_a_densenet_that_cannot_be_built_is_refused(architecture: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        build_network(Recipe(network="densenet_bc", architecture=architecture), CIFAR, 10)


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
        (Recipe(network="lenet"), UnknownNameError, "Try 'lenet5'"),
        (Recipe(architecture={"widht": 3}), UnknownNameError, "Try 'width'"),
        (Recipe(architecture={"width": "wide"}), OptionError, "for the network 'mlp'"),
        (Recipe(network="training_cases:undecided", architecture={"width": 3}), OptionError, "takes no arguments"),
        (Recipe(network="cnn6"), ModelError, r"Expected images \(channels, height, width\)"),
        (Recipe(network="training_cases:examples"), ModelError, r"Expected a torch.nn.Module.* but got .*Examples"),
        (Recipe(optimizer="sgdm"), UnknownNameError, "Try 'sgd'"),
        (Recipe(schedule="cosin"), UnknownNameError, "Try 'cosine'"),
        (Recipe(init="xavier"), UnknownNameError, "Try 'xavier_"),
        (Recipe(augment="flips"), UnknownNameError, "Try 'flip'"),
        (Recipe(dtype="float16"), UnknownNameError, "Try 'float"),
        (Recipe(lr=-1.0), OptionError, "Expected a number above 0, but got lr=-1.0"),
        (Recipe(lr=math.nan), OptionError, "got lr=nan"),
        (Recipe(batch_size=0), OptionError, "Expected a whole number from 1, but got batch_size=0"),
        (Recipe(dropout=1.0), OptionError, "got dropout=1.0"),
        (Recipe(label_noise=1.5), OptionError, "Expected a number from 0 to 1, but got label_noise=1.5"),
        (Recipe(epochs=2.5), OptionError, "got epochs=2.5"),  # type: ignore[arg-type]
        (Recipe(epochs=2.0), OptionError, "got epochs=2.0"),  # type: ignore[arg-type]
        (Recipe(lr=math.inf), OptionError, "got lr=inf"),
        (Recipe(seed=True), OptionError, "got seed=True"),
        (Recipe(milestones=("half",)), OptionError, "got milestones"),  # type: ignore[arg-type]
    ],
)
def test_a_recipe_that_means_nothing_is_refused(recipe: Recipe, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build_network(recipe, (6,), 3)
