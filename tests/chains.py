"""Tiny chains: one layer after the other, with nothing between them that notices a change of scale."""

from collections.abc import Callable
from dataclasses import replace

import torch
from cases import Case, integers, problem, reals
from torch import nn

CHAINS: dict[str, Callable[[], Case]] = {}


def chain(build: Callable[[], Case]) -> Callable[[], Case]:
    """Enter a builder in ``CHAINS``; each call builds the same problem anew and leaves the random state alone."""

    def seeded() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return replace(build(), name=build.__name__)

    CHAINS[build.__name__] = seeded
    return seeded


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that have weights, by name, in the order in which the data passes them."""
    assert isinstance(model, nn.Sequential)
    return [(name, module) for name, module in model.named_children() if hasattr(module, "weight")]


def weights_and_biases(model: nn.Module) -> list[tuple[str, str | None]]:
    """The same layers as names of parameters; None for a layer without biases."""
    parameters = dict(model.named_parameters())
    return [
        (f"{name}.weight", f"{name}.bias" if f"{name}.bias" in parameters else None) for name, _ in layers_of(model)
    ]


@chain
def mlp_without_biases() -> Case:
    model = nn.Sequential(
        nn.Linear(4, 7, bias=False), nn.ReLU(), nn.Linear(7, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)
    )
    return problem(model, reals(9, 4), integers(3, 9))


@chain
def mlp_with_biases() -> Case:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    return problem(model, reals(10, 4), integers(4, 10), sizes=(3, 6, 1))


@chain
def mlp_of_four_layers() -> Case:
    model = nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)
    )
    return problem(model, reals(12, 3), integers(3, 12))


@chain
def leaky_relu_mlp() -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.1), nn.Linear(5, 4), nn.LeakyReLU(0.3), nn.Linear(4, 5))
    return problem(model, reals(8, 4), integers(5, 8))


@chain
def regression_mlp() -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return problem(model, reals(9, 4), reals(9, 3), "mse")


@chain
def mlp_with_a_dead_unit() -> Case:
    built = problem(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), reals(10, 4), integers(3, 10))
    with torch.no_grad():
        built.model.get_parameter("0.bias")[2] = -10
    return built


def pooled_convolutions(bias: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 2, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(3, 3, 2, bias=bias),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 3, bias=bias),
    )


@chain
def convolutions_without_biases() -> Case:
    return problem(pooled_convolutions(bias=False), reals(8, 2, 5, 5), integers(3, 8))


@chain
def convolutions_with_biases() -> Case:
    return problem(pooled_convolutions(bias=True), reals(8, 2, 5, 5), integers(3, 8))


@chain
def convolution_with_global_average_pooling() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
    )
    return problem(model, reals(9, 2, 4, 3), integers(4, 9))


@chain
def grouped_and_depthwise_convolutions() -> Case:
    model = nn.Sequential(
        nn.Conv2d(4, 6, 2, groups=2),
        nn.ReLU(),
        nn.Conv2d(6, 6, 2, groups=6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1, groups=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return problem(model, reals(8, 4, 4, 4), integers(3, 8))
