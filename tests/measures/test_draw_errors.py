"""Errors over random draws: minima to first order, against minima that are solved again."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn

import saltflat
from saltflat.engine.context import StatisticResult
from saltflat.layers import Geometry
from saltflat.measures import apply
from saltflat.measures.registry import MeasureResult, parse_measure

MINIMA = [
    "normalized_sharpness",
    "normalized_sharpness_arxiv",
    "normalized_sharpness_printed",
    "minimum_sharpness",
    "minimum_unit_sharpness",
]


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))


def build_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (build_mlp, (8,)),
    "convolutions": (build_convolutions, (1, 8, 8)),
}


@pytest.mark.parametrize("columns", ["sampled:3", "sampled:8", "top:2"])
@pytest.mark.parametrize("name", NETWORKS)
def test_errors_over_draws_are_those_of_minima_that_are_solved_again(name: str, columns: str) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model, data = build(), (torch.randn(20, *shape), torch.arange(20) % 5)

    def measure() -> saltflat.Report:
        return saltflat.measure(
            model, data, measures=MINIMA, columns=columns, certificate=False, sampling=False, dtype=torch.float64
        )

    found = measure()
    with patch.object(apply, "SHORTFALL", -1.0):
        expected = measure()
    for each in MINIMA:
        assert found[each].value == expected[each].value
        ratio = found[each].stderr / expected[each].stderr  # type: ignore[operator]
        assert 0.93 < ratio < 1.07
        for layer, error in found[each].layer_stderr.items():
            assert 0.85 < error / expected[each].layer_stderr[layer] < 1.15


def test_draws_that_differ_too_much_for_first_order_are_solved_again() -> None:
    # The scales of two rows follow each draw: the first has curvature in one row only, the second in the other.
    draws = [torch.tensor([[9.0, 1.0], [0.1, 0.2]]), torch.tensor([[0.1, 0.1], [1.0, 9.0]])]
    request = parse_measure("normalized_sharpness")
    weight = {"w": torch.tensor([[1.0, 2.0], [3.0, 1.0]])}
    mean = {"w": (draws[0] + draws[1]) / 2}
    needed = {
        "weight": StatisticResult(weight),
        "curvature_diagonal": StatisticResult(mean, tuple({"w": each} for each in draws)),
    }
    function = request.measure.function
    shapes = {"w": Geometry(torch.Size([2, 2]))}
    whole = apply.compute_parts(request, {"weight": weight, "curvature_diagonal": mean}, shapes)
    found = apply._compute_replicas(request, needed, whole, shapes, 2)
    for part, draw in zip(found, draws, strict=True):
        exact = function(weight=weight["w"], curvature_diagonal=draw)
        assert isinstance(exact, MeasureResult)
        assert float(part["w"].value) == pytest.approx(float(exact.value), rel=1e-9)


def test_draws_that_differ_little_are_not_solved_again() -> None:
    torch.manual_seed(0)
    model, data = build_mlp(), (torch.randn(20, 8), torch.arange(20) % 5)
    with patch.object(apply, "_compute_part", wraps=apply._compute_part) as solved:
        saltflat.measure(
            model, data, measures="minimum_unit_sharpness", columns="sampled:8", certificate=False, sampling=False
        )
    assert solved.call_count == 2  # with all draws, and without the one that matters most
