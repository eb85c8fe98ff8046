"""Feature robustness against changed features, dense Hessians and numbers by hand."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from curvature_cases import CubeOnce, cubed
from promise_cases import snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import saltflat
from saltflat.bounds.feature_layer import Ball, FeatureLayer, find_feature_module, solve_feature_matrix
from saltflat.bounds.feature_robustness import DELTAS, feature_robustness
from saltflat.bounds.robustness_result import FeatureRobustness
from saltflat.cli import app
from saltflat.errors import ModelError, NonFiniteError, OptionError, ParameterError, ReportError, UnknownNameError

Norm = Literal["operator", "frobenius"]
QUICK: dict[str, Any] = {"draws": 2, "restarts": 0, "steps": 3}


def reals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), activation(), nn.Linear(9, 7), activation(), nn.Linear(7, 4)).double().eval()


def images() -> nn.Sequential:
    torch.manual_seed(1)
    made = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), groups=2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(6 * 3 * 3, 3)),
    )
    return made.double().eval()


DATA = {"mlp": (reals(30, 6), torch.arange(30) % 4), "images": (reals(10, 2, 7, 8, seed=3), torch.arange(10) % 3)}


def contraction(features: int, groups: int = 1, seed: int = 5) -> Tensor:
    A = reals(groups, features, features, seed=seed)
    A /= torch.linalg.matrix_norm(A, 2)[:, None, None]
    return A[0] if groups == 1 else A


def rise_by_features(model: nn.Module, data: tuple[Tensor, Tensor], layer: str, A: Tensor, delta: float) -> float:
    """F as it is defined: the layer sees other features. Patches of an image are changed one by one."""
    model = deepcopy(model)
    module: Any = model.get_submodule(layer)

    def change(module: Any, args: tuple[Tensor], y: Tensor) -> Tensor:
        (x,) = args
        if isinstance(module, nn.Linear):
            return F.linear(x + delta * x @ A.mT, module.weight, module.bias)
        sizes = (module.kernel_size, module.dilation, module.padding, module.stride)
        patches = F.unfold(x, *sizes).unflatten(1, (module.groups, -1))  # (examples, groups, features, positions)
        changed = patches + delta * A.reshape(module.groups, *A.shape[-2:]) @ patches
        weight = module.weight.reshape(module.groups, -1, patches.shape[2])
        moved: Tensor = (weight @ changed).reshape(y.shape) + module.bias[:, None, None]
        return moved

    before = F.cross_entropy(model(data[0]), data[1])
    module.register_forward_hook(change)
    return float((F.cross_entropy(model(data[0]), data[1]) - before).detach())


def dense_hessian(model: nn.Module, data: tuple[Tensor, Tensor], name: str) -> Tensor:
    """The Hessian of the mean loss with respect to a weight, a matrix."""
    weight = model.get_parameter(name).detach()

    def loss(flat: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, {name: flat.reshape(weight.shape)}, (data[0],))
        return F.cross_entropy(outputs, data[1])

    H: Tensor = torch.autograd.functional.hessian(loss, weight.flatten())
    return H


def layer_of(model: nn.Module, name: str) -> FeatureLayer:
    found, module = find_feature_module(model, name)
    return FeatureLayer.build(found, module, model.get_parameter(found).detach())


# The two sides of the definition.


@pytest.mark.parametrize(
    ("kind", "layer"), [("mlp", "0"), ("mlp", "2"), ("mlp", "4"), ("images", "0"), ("images", "2")]
)
def test_changes_of_features_are_changes_of_weights(kind: str, layer: str) -> None:
    model, data = (mlp() if kind == "mlp" else images()), DATA[kind]
    shape = layer_of(model, layer)
    A = contraction(shape.features, shape.groups)
    found = feature_robustness(model, data, layer, matrix=A, deltas=[1e-3, 0.1, 1.0], per_example=False, **QUICK)
    for point in found.points:
        wanted = rise_by_features(model, data, layer, A, point.delta)
        assert point.given == pytest.approx(wanted, abs=1e-10)
        assert abs(wanted) > 1e-6


def test_a_matrix_for_all_groups_is_that_of_each_group() -> None:
    A = contraction(12)
    options: dict[str, Any] = {"deltas": 0.1, "per_example": False, **QUICK}
    one = feature_robustness(images(), DATA["images"], "2", matrix=A, **options)
    two = feature_robustness(images(), DATA["images"], "2", matrix=torch.stack([A, A]), **options)
    assert (one.groups, one.features, one.rows) == (2, 12, 3)
    assert one.points[0].given == two.points[0].given


@pytest.mark.parametrize("layer", ["0", "2"])
def test_a_wanted_change_of_the_weight_is_one_of_the_features(layer: str) -> None:
    """Both convolutions have fewer rows than features: there is an A for every change."""
    module: Any = images().get_submodule(layer)
    change = reals(*module.weight.shape, seed=8)
    found = solve_feature_matrix(module.weight, change, module.groups)
    w, V = (each.detach().reshape(module.groups, -1, found.matrix.shape[-1]) for each in (module.weight, change))
    assert found.full_row_rank
    assert found.residual < 1e-10
    assert float((w @ found.matrix - V).abs().max()) < 1e-10
    largest = torch.linalg.matrix_norm(found.matrix.reshape(module.groups, *found.matrix.shape[-2:]), 2).max()
    assert found.norm == pytest.approx(float(largest))


def test_what_no_change_of_features_can_do_is_the_residual() -> None:
    w = torch.tensor([[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]])  # rank one
    inside, outside = torch.tensor([[3.0, 1.0], [6.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0]] * 2 + [[5.0, 0.0]])
    assert solve_feature_matrix(w, inside).residual < 1e-12
    found = solve_feature_matrix(w, inside + outside)
    assert not found.full_row_rank
    assert found.residual == pytest.approx(5 / math.sqrt(9 + 1 + 36 + 4 + 25))
    assert solve_feature_matrix(w, torch.zeros(3, 2)).residual == 0
    tall = nn.Linear(2, 3).weight
    assert not solve_feature_matrix(tall, torch.ones(3, 2)).full_row_rank


# What the largest rise and the means are compared with.


@pytest.mark.parametrize(("kind", "layer"), [("mlp", "2"), ("mlp", "4"), ("images", "2"), ("tanh", "2"), ("tanh", "4")])
def test_curvature_is_that_of_the_dense_hessian(kind: str, layer: str) -> None:
    """By the sweep if the layer's Gauss-Newton matrix is its Hessian, entry by entry otherwise."""
    model = images() if kind == "images" else mlp(nn.Tanh if kind == "tanh" else nn.ReLU)
    data = DATA["images" if kind == "images" else "mlp"]
    shape, found = layer_of(model, layer), feature_robustness(model, data, layer, per_example=False, **QUICK)
    H = dense_hessian(model, data, f"{layer}.weight")
    blocks = H.reshape(*shape.weight.shape, *shape.weight.shape)
    pairs = torch.einsum("gsi,gti,gsjgtj->", shape.weight, shape.weight, blocks)
    top = float(torch.linalg.eigvalsh(H)[-1])
    squares = float(shape.weight.square().sum())
    assert found.top_eigenvalue == pytest.approx(top, rel=1e-8)
    assert found.kappa == pytest.approx(squares * top, rel=1e-8)
    assert found.hessian_trace == pytest.approx(float(H.trace()), rel=1e-9)
    assert found.relative_flatness == pytest.approx(float(pairs), rel=1e-9)
    assert found.hessian_trace_stderr == found.relative_flatness_stderr == 0
    half = found.points[0].delta ** 2 / 2
    assert found.points[0].bound == pytest.approx(half * found.kappa)
    assert found.points[0].predicted == pytest.approx(half * found.relative_flatness / shape.features)
    if kind != "tanh":  # the measures take the Gauss-Newton matrix
        report = saltflat.measure(
            model, data, measures=["kappa", "kappa_trace", "relative_flatness(normalize=False)"], layers=[layer]
        )
        assert found.kappa == pytest.approx(report["kappa"].layers[f"{layer}.weight"], rel=1e-6)
        assert found.kappa_trace == pytest.approx(report["kappa_trace"].layers[f"{layer}.weight"], rel=1e-6)
        same = report["relative_flatness(normalize=False)"].layers[f"{layer}.weight"]
        assert found.relative_flatness == pytest.approx(same, rel=1e-6)


def test_traces_of_large_layers_with_curved_outputs_are_estimates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3)).double().eval()
    data = reals(40, 30), torch.arange(40) % 3
    found = feature_robustness(model, data, "0", deltas=0.1, draws=40, restarts=0, steps=1, per_example=False)
    H = dense_hessian(model, data, "0.weight")
    W = layer_of(model, "0").weight[0]
    pairs = float(torch.einsum("si,ti,sjtj->", W, W, H.reshape(20, 30, 20, 30)))
    assert abs(found.hessian_trace - float(H.trace())) < 4 * found.hessian_trace_stderr
    assert abs(found.relative_flatness - pairs) < 4 * found.relative_flatness_stderr
    assert any("estimates" in note for note in found.notes)


@pytest.mark.parametrize("layer", ["0", "2"])
def test_random_orthogonal_matrices_are_uniform(layer: str) -> None:
    """Orthonormal rows; means and products of entries as Haar's measure has them, in each group by itself."""
    shape = layer_of(images(), layer)
    drawn = torch.stack([shape.draw_orthogonal(0, number) for number in range(4000)])
    eye = torch.eye(shape.rank, dtype=torch.float64)
    assert float((drawn @ drawn.mT - eye).abs().max()) < 1e-12
    flat, m = drawn.flatten(1), shape.features
    # Without the signs, the entries of the first column would lean to one side.
    assert float(flat.mean(0).abs().max()) < 5 / math.sqrt(4000 * m)
    off = flat.mT @ flat / 4000 - torch.eye(flat.shape[1], dtype=torch.float64) / m
    assert float(off.abs().max()) < 6 / m / math.sqrt(4000)


def test_the_mean_over_orthogonal_matrices_has_its_constant() -> None:
    """The sum over pairs of rows, divided by the features: far below the paper's constant for several rows."""
    model, data = mlp(nn.Tanh), DATA["mlp"]
    found = feature_robustness(model, data, "4", deltas=[0.01, 0.1], draws=400, restarts=0, steps=1, per_example=False)
    for point in found.points:
        # The gradient is far from zero, and has no part in it: A and -A are equally likely.
        assert not point.applies
        assert abs(point.orthogonal - point.predicted) < 4 * point.orthogonal_stderr
        assert point.orthogonal_stderr < 0.1 * point.predicted
        assert point.predicted < 0.5 * point.trace_bound


def test_kinks_add_to_the_mean_as_curvature_does() -> None:
    """Below the first switch of a unit, the mean is that of second order to many digits; above it is another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)).double().eval()
    data = reals(200, 5), torch.arange(200) % 3
    options: dict[str, Any] = {"draws": 20, "restarts": 0, "steps": 1, "per_example": False}
    found = feature_robustness(model, data, "0", deltas=[1e-6, 1e-2], **options)
    small, large = found.points
    assert small.is_smooth
    assert small.orthogonal == pytest.approx(small.second_order, rel=1e-2)  # rounding of the losses
    assert not large.is_smooth
    assert large.second_order == pytest.approx(1e8 * small.second_order)
    assert any("kinks" in note for note in found.notes)
    smooth = feature_robustness(mlp(nn.Tanh), DATA["mlp"], "0", deltas=[1e-3, 1e-2], **options)
    for point in smooth.points:
        assert point.orthogonal == pytest.approx(point.second_order, rel=1e-2)
    assert not any("kinks" in note for note in smooth.notes)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_constants_agree_for_a_single_row_only(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, rows).double()
    data = reals(20, 5), reals(20, rows, seed=1)
    found = feature_robustness(model, data, "weight", "mse", per_example=False, **QUICK)
    same = found.relative_flatness == pytest.approx(found.kappa_trace, rel=1e-12)
    assert same == (rows == 1)
    assert found.relative_flatness <= found.kappa_trace * (1 + 1e-12)


def test_the_paper_s_constant_is_no_bound_where_the_loss_curves_down() -> None:
    """L = (w1 x1)^2 - (w2 x2)^2 with w1 = 2, w2 = 1: the trace is 0, and the sum over rows 8 - 2."""

    def saddle(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[..., 0].square() - outputs[..., 1].square() - 0 * targets[..., 0]).mean()

    model = nn.Linear(1, 2, bias=False).double()
    model.weight.data = torch.tensor([[2.0], [1.0]]).double()
    found = feature_robustness(
        model, (torch.ones(2, 1).double(), torch.zeros(2, 2).double()), "weight", saddle, deltas=0.1, **QUICK
    )
    assert found.kappa_trace == pytest.approx(0, abs=1e-12)
    assert found.relative_flatness == pytest.approx(6)
    assert found.points[0].orthogonal == pytest.approx(0.1**2 * 3)  # A is 1 or -1: (1 + delta)^2 and (1 - delta)^2
    assert any("negative eigenvalues" in note for note in found.notes)


# The largest rise.


def least_squares() -> tuple[nn.Linear, tuple[Tensor, Tensor], Tensor]:
    """A single output at the minimum of a quadratic loss."""
    model = nn.Linear(4, 1, bias=False).double()
    x = reals(12, 4)
    model.weight.data = reals(1, 4, seed=2)
    return model, (x, model(x).detach()), 2 * x.mT @ x / 12


def test_the_bound_is_reached_for_a_quadratic_loss_with_one_output() -> None:
    """w A is any vector as long as w: the maximum is the bound, for every delta."""
    model, data, H = least_squares()
    found = feature_robustness(model, data, "weight", "mse")
    assert found.kappa == pytest.approx(float(model.weight.detach().square().sum() * torch.linalg.eigvalsh(H)[-1]))
    for point in found.points:
        assert point.applies
        assert point.largest == pytest.approx(point.bound, rel=1e-5)
        assert point.largest <= point.bound * (1 + 1e-9)
        assert point.gap < 1e-4
    assert found.applies
    assert found.points[-1].delta == 1


@pytest.mark.parametrize("norm", ["operator", "frobenius"])
def test_the_largest_rise_is_found_in_the_ball_of_the_norm(norm: Norm) -> None:
    """A linear loss rises by the dual norm; far from a minimum, first order is all there is."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3, bias=False).double()
    x = reals(9, 4)

    def linear(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).sum(-1).mean()

    targets = reals(9, 3, seed=4)
    found = feature_robustness(model, (x, targets), "weight", linear, norm=norm, deltas=[0.1, 1.0])
    slope = model.weight.detach().mT @ targets.mT @ x / 9
    wanted = float(slope.norm() if norm == "frobenius" else torch.linalg.svdvals(slope).sum())
    for point in found.points:
        assert point.largest == pytest.approx(point.delta * wanted, rel=1e-9)
        assert point.first_order == pytest.approx(point.delta * wanted, rel=1e-9)
        assert not point.applies
        assert point.orthogonal == pytest.approx(0, abs=1e-12)
    assert found.applies_from == math.inf
    assert any("at no delta" in note for note in found.notes)


def test_no_matrix_that_was_not_tried_raises_the_loss_more() -> None:
    """A search may fail; here it beats 3000 random matrices of norm one for every delta."""
    model, data = mlp(), DATA["mlp"]
    found = feature_robustness(model, data, "2", deltas=[0.01, 0.3], draws=2, per_example=False)
    layer = layer_of(model, "2")
    weight, plain = layer.weight[0], F.cross_entropy(model(data[0]), data[1])
    for point in found.points:
        for number in range(1500):
            A = torch.linalg.qr(reals(9, 9, seed=number)).Q
            moved = {"2.weight": weight + point.delta * weight @ A}
            rise = F.cross_entropy(torch.func.functional_call(model, moved, (data[0],)), data[1]) - plain
            assert float(rise.detach()) <= point.largest


def test_a_larger_ball_never_has_a_smaller_rise() -> None:
    found = feature_robustness(mlp(nn.Tanh), DATA["mlp"], "2", restarts=0, steps=2, draws=2)
    for name in ("largest", "worst", "mean_worst"):
        values = [getattr(point, name) for point in found.points]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(values))


def test_projections_are_the_nearest_matrices() -> None:
    B = reals(2, 3, 5, seed=6)
    for norm in ("operator", "frobenius"):
        ball = Ball(norm)
        near = ball.project(B)
        assert ball.compute_norm(near) <= 1 + 1e-12
        assert torch.equal(ball.project(near / 2), near / 2) or torch.allclose(ball.project(near / 2), near / 2)
        furthest = ball.find_furthest(B)
        assert float((furthest * B).sum()) == pytest.approx(ball.compute_dual_norm(B))
        for seed in range(50):
            other = ball.project(reals(2, 3, 5, seed=seed) * 0.7)
            assert float(((B - near) * (other - near)).sum()) <= 1e-12
            assert float((other * B).sum()) <= ball.compute_dual_norm(B) + 1e-12


# At a minimum.


@cache
def minimum() -> tuple[nn.Sequential, tuple[Tensor, Tensor], nn.CrossEntropyLoss]:
    """A small network, trained to a minimum: the targets are the probabilities of a network of its kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs = reals(100, 4)
    data, loss = (inputs, (2 * model(inputs)).softmax(1).detach()), nn.CrossEntropyLoss()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        history_size=60,
        tolerance_grad=1e-13,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(model(data[0]), data[1])
        value.backward()
        return value

    optimizer.step(closure)
    return model.eval(), data, loss


@pytest.mark.parametrize("layer", ["0", "2"])
def test_at_a_minimum_the_bound_holds_and_rises_follow_a_square_law(layer: str) -> None:
    model, data, loss = minimum()
    found = feature_robustness(model, data, layer, loss)
    assert (found.deltas[0], found.deltas[-1]) == (1e-4, 1.0)
    assert found.gradient_norm < 1e-6
    assert found.applies
    assert any("applies at every delta" in note for note in found.notes)
    small = [point for point in found.points if point.delta < 0.02]
    for point in small:
        # The bound leaves out terms of third order: at delta = 0.01 up to a few percent.
        assert 0 < point.largest <= point.bound * (1 + 5 * point.delta)
    for name, power in (("largest", 2), ("orthogonal", 2), ("predicted", 2), ("bound", 2)):
        logs = [math.log10(getattr(point, name)) for point in small]
        slope = np.polyfit([math.log10(point.delta) for point in small], logs, 1)[0]
        assert slope == pytest.approx(power, abs=0.03), name


def test_away_from_a_minimum_the_first_order_dominates_small_changes() -> None:
    found = feature_robustness(mlp(), DATA["mlp"], "2")
    first = found.points[0]
    assert not first.applies
    assert first.largest == pytest.approx(first.first_order, rel=1e-3)
    assert first.largest > 100 * first.bound
    slope = math.log10(found.points[1].largest / first.largest) / math.log10(found.deltas[1] / first.delta)
    assert slope == pytest.approx(1, abs=0.01)
    assert not found.applies
    # With the first order, the bound holds again.
    assert all(p.largest <= (p.first_order + p.bound) * (1 + 10 * p.delta) for p in found.points if p.delta < 0.02)


def test_a_constant_loss_does_not_rise() -> None:
    def constant(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.ones(())

    found = feature_robustness(mlp(), DATA["mlp"], "2", constant, deltas=0.1, **QUICK)
    (point,) = found.points
    assert point.largest == point.bound == point.first_order == point.orthogonal == point.worst == found.kappa == 0


# Single examples.


def one_among_many() -> tuple[nn.Linear, tuple[Tensor, Tensor]]:
    """999 examples with features (0.1, 0), one with (0, 10), and f = first feature: no loss at all.

    Turning the second feature into the first, A = [[0, 1], [0, 0]], changes the last example's output by 10 delta and
    no other: its loss rises by 100 delta^2, the mean by a thousandth of that.
    """
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.tensor([[1.0, 0.0]]).double()
    inputs = torch.tensor([[0.1, 0.0]] * 999 + [[0.0, 10.0]]).double()
    return model, (inputs, model(inputs).detach())


def test_the_mean_hides_a_large_change_of_one_example() -> None:
    model, data = one_among_many()
    A = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double()
    found = feature_robustness(model, data, "weight", "mse", deltas=[0.01, 0.1], matrix=A)
    # H = 2 / 1000 diag(999 * 0.01, 100): kappa = 0.2, and |w A| = |w|.
    assert found.kappa == pytest.approx(0.2)
    for point in found.points:
        square = point.delta**2
        assert point.given == pytest.approx(0.1 * square)
        assert point.largest == pytest.approx(0.1 * square, rel=1e-5)
        assert point.bound == pytest.approx(0.1 * square)
        assert point.worst == pytest.approx(100 * square)
        assert point.worst_example == 999
        # The others rise by (0.1 delta)^2 each.
        assert point.mean_worst == pytest.approx((999 * 0.01 + 100) / 1000 * square)
        assert point.worst == pytest.approx(1000 * point.largest, rel=1e-5)


def test_worst_changes_of_examples_are_those_on_a_fine_circle() -> None:
    """Two features: every direction can be tried."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double().eval()
    model.get_parameter("2.weight").data *= 3
    data = reals(15, 2), torch.arange(15) % 3
    deltas = [0.05, 0.5]
    found = feature_robustness(model, data, "0", deltas=deltas, draws=2, restarts=0)
    turns = torch.linspace(0, 2 * math.pi, 4001).double()
    circle = torch.stack([turns.cos(), turns.sin()], 1)
    plain = F.cross_entropy(model(data[0]), data[1], reduction="none")
    for point in found.points:
        steps = (
            point.delta * data[0].norm(dim=1)[:, None, None] * circle * torch.linspace(0, 1, 21)[:, None, None, None]
        )
        moved = model(data[0][:, None] + steps)  # (lengths, examples, directions, classes)
        there = moved.logsumexp(-1) - moved[:, torch.arange(15), :, data[1]].movedim(0, 1)
        rises = (there - plain[:, None]).amax((0, 2)).detach()
        assert point.worst == pytest.approx(float(rises.max()), rel=1e-4)
        assert point.worst_example == int(rises.argmax())
        assert point.mean_worst == pytest.approx(float(rises.mean()), rel=1e-3)


@pytest.mark.parametrize(("kind", "layer"), [("mlp", "2"), ("images", "0"), ("images", "2")])
def test_no_matrix_changes_an_example_more_than_its_worst_change(kind: str, layer: str) -> None:
    """|A phi| is at most |phi|: the worst change of each example covers all A, patch by patch."""
    model, data = (mlp() if kind == "mlp" else images()), DATA[kind]
    found = feature_robustness(model, data, layer, deltas=[0.02, 0.2], draws=2, restarts=1)
    for point in found.points:
        assert point.worst is not None
        assert point.mean_worst is not None
        assert point.mean_worst >= point.largest * (1 - 1e-6)
        assert point.worst >= point.mean_worst


def test_worst_changes_do_not_depend_on_the_chunks() -> None:
    model, (inputs, targets) = images(), DATA["images"]
    options: dict[str, Any] = {"deltas": [0.1], "draws": 2, "restarts": 0, "steps": 40}
    whole = feature_robustness(model, (inputs, targets), "2", **options).points[0]
    parts = [(inputs[n : n + 1], targets[n : n + 1]) for n in range(10)]
    single = feature_robustness(model, parts, "2", memory="100KiB", **options).points[0]
    assert single.worst == pytest.approx(whole.worst, rel=1e-3)
    assert single.worst_example == whole.worst_example
    assert single.mean_worst == pytest.approx(whole.mean_worst, rel=1e-3)
    assert single.largest == pytest.approx(whole.largest, rel=1e-8)


@pytest.mark.parametrize("kind", ["sequences", "one dimension", "ignored targets"])
def test_other_inputs_and_losses(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "one dimension":
        model: nn.Module = nn.Sequential(
            nn.Conv1d(2, 3, 3, padding="same", padding_mode="circular"), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3)
        )
        data, layer = (reals(8, 2, 5), torch.arange(8) % 3), "0"
    else:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        targets = torch.arange(24).reshape(6, 4) % 3
        if kind == "ignored targets":
            targets[2:4] = -100
            targets[0, 1:] = -100
        data, layer = (reals(6, 4, 4), targets), "2"
    found = feature_robustness(model.double(), data, layer, deltas=[0.1], draws=3, restarts=0)
    point = found.points[0]
    assert point.worst is not None
    assert point.worst > 0
    assert point.worst_example not in ((2, 3) if kind == "ignored targets" else ())
    assert point.largest > 0


# Results.


@cache
def example() -> FeatureRobustness:
    return feature_robustness(mlp(), DATA["mlp"], "2", matrix=torch.eye(9), draws=3, restarts=0, steps=2)


def test_results_are_saved_and_loaded_unchanged(tmp_path: Path) -> None:
    path = example().save(tmp_path / "robust.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["schema"] == "saltflat.feature_robustness/1"
    assert FeatureRobustness.load(path) == example()
    plain = replace(
        example(), points=tuple(replace(p, given=None, worst=None, orthogonal=math.nan) for p in example().points)
    )
    assert FeatureRobustness.from_dict(plain.to_dict()) == plain
    assert plain != example()


WRONG: dict[str, Any] = {
    "no points": {"points": []},
    "a point that is none": {"points": [3]},
    "an unknown entry": {"more": 1},
    "a norm that does not exist": {"norm": "nuclear"},
    "no features": {"features": 0},
    "a rank that is text": {"rank": "3"},
    "a slope that is text": {"slope": "0"},
    "an infinite loss": {"loss": {"$float": "inf"}},
    "settings that are a list": {"settings": []},
    "another schema": {"schema": "saltflat.spectrum/1"},
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_say_something_else_are_refused(name: str) -> None:
    with pytest.raises(ReportError):
        FeatureRobustness.from_dict({**example().to_dict(), **WRONG[name]})


@pytest.mark.parametrize(
    "entry", [{"delta": -1.0}, {"applies": 1}, {"worst": "much"}, {"worst_example": -2}, {"gap": None}]
)
def test_points_that_cannot_be_are_refused(entry: dict[str, Any]) -> None:
    given = example().to_dict()
    given["points"][0].update(entry)
    with pytest.raises(ReportError):
        FeatureRobustness.from_dict(given)


def test_results_describe_themselves() -> None:
    text = " ".join(str(example()).split())
    assert "2.weight, 9 features | 30 examples" in text
    assert "delta largest found bound first order bound applies given A" in text
    assert "lower bound of the maximum" in text
    assert "kappa" in example()._repr_html_()
    assert "FeatureRobustness of 2.weight" in repr(example())
    bare = feature_robustness(mlp(), DATA["mlp"], "2", deltas=0.1, per_example=False, **QUICK)
    assert "worst" not in str(bare)
    assert bare.points[0].worst is bare.points[0].given is None


def test_the_command_line_shows_results_but_writes_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = example().save(tmp_path / "robust.json")
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == f"{example()}\n"
    refused = CliRunner().invoke(app, ["show", str(path), "--html", str(tmp_path / "page.html")])
    assert refused.exit_code == 2
    assert "a feature robustness with --html" in refused.stderr


def test_plots_are_logarithmic_and_leave_out_what_is_not_positive() -> None:
    (axis,) = example().plot().axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    labels = axis.get_legend_handles_labels()[1]
    assert {"bound, delta² kappa / 2", "largest found", "worst example", "largest, first order"} <= set(labels)
    zeros: dict[str, Any] = dict.fromkeys(
        ("largest", "bound", "first_order", "orthogonal", "predicted", "given", "worst"), 0.0
    )
    empty = replace(example(), points=tuple(replace(p, **zeros) for p in example().points))
    assert not empty.plot().axes[0].lines


def test_rises_that_are_rounding_are_named() -> None:
    single = mlp().float(), (DATA["mlp"][0].float(), DATA["mlp"][1])
    found = feature_robustness(*single, "2", per_example=False, **QUICK)
    assert found.settings["dtype"] == "float32"
    assert any("Try dtype=torch.float64" in note for note in found.notes)
    fine = feature_robustness(*single, "2", per_example=False, dtype=torch.float64, **QUICK)
    assert not any("rounding" in note for note in fine.notes)
    assert fine.points[4].largest == pytest.approx(found.points[4].largest, rel=1e-2)


def test_weights_of_low_rank_are_named() -> None:
    model = mlp()
    weight = model.get_parameter("2.weight").data
    weight[1] = 2 * weight[0]
    found = feature_robustness(model, DATA["mlp"], "2", deltas=0.1, per_example=False, **QUICK)
    assert (found.rank, found.rows) == (6, 7)
    assert any("rank 6" in note for note in found.notes)


# Promises.


def test_the_model_is_given_back_and_any_data_will_do() -> None:
    model = mlp().train()
    before = snapshot(model)
    inputs, targets = DATA["mlp"]
    seen: list[str] = []
    options: dict[str, Any] = {"deltas": [0.01, 0.1], **QUICK}
    first = feature_robustness(model, (inputs, targets), "2", progress=lambda what, *_: seen.append(what), **options)
    assert snapshot(model) == before
    assert {"Largest eigenvalue of the layer", "Search for the largest rise", "Random orthogonal matrices"} <= set(seen)
    assert any("train mode" in note for note in first.notes)
    forms: list[Any] = [
        DataLoader(TensorDataset(inputs, targets), batch_size=7, shuffle=True),
        TensorDataset(inputs, targets),
        [(inputs[:11], targets[:11]), (inputs[11:], targets[11:])],
    ]
    for data in forms:
        found = feature_robustness(model, data, "2.weight", **options)
        for one, two in zip(found.points, first.points, strict=True):
            assert two.largest == pytest.approx(one.largest, rel=1e-6)
            assert two.orthogonal == pytest.approx(one.orthogonal, rel=1e-6)
    half = feature_robustness(model, (inputs, targets), "2", limit=15, **options)
    assert half == replace(
        feature_robustness(model, (inputs[:15], targets[:15]), "2", **options),
        seconds=half.seconds,
        created=half.created,
    )
    assert snapshot(model) == before


def test_little_memory_gives_the_same_numbers() -> None:
    options: dict[str, Any] = {"deltas": [0.1], **QUICK}
    much = feature_robustness(mlp(), DATA["mlp"], "2", **options).points[0]
    little = feature_robustness(mlp(), DATA["mlp"], "2", memory="60KiB", **options).points[0]
    assert little.largest == pytest.approx(much.largest, rel=1e-9)
    assert little.worst == pytest.approx(much.worst, rel=1e-6)


def test_the_same_seed_gives_the_same_numbers() -> None:
    options: dict[str, Any] = {"deltas": [0.1], "per_example": False, **QUICK}
    one, two, other = (feature_robustness(mlp(), DATA["mlp"], "2", seed=seed, **options) for seed in (1, 1, 2))
    assert one.points == two.points
    assert one.points[0].orthogonal != other.points[0].orthogonal


class Twice(nn.Module):
    """Calls a layer twice, or uses its weight a second time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.head, self.how = nn.Linear(6, 6), nn.Linear(6, 4), how
        if how == "shared":
            self.other = nn.Linear(6, 6)
            self.other.weight = self.fc.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc(x)) if self.how != "never" else x
        if self.how == "twice":
            x = torch.tanh(self.fc(x))
        elif self.how == "again":
            x = x @ self.fc.weight
        elif self.how == "shared":
            x = self.other(x)
        found: Tensor = self.head(x)
        return found


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("twice", "is called 2 times"),
        ("never", "is called 0 times"),
        ("again", "used outside of it"),
        ("shared", "2 modules share"),
    ],
)
def test_layers_that_are_not_used_once_are_refused(how: str, said: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ParameterError, match=said):
        feature_robustness(Twice(how).double(), DATA["mlp"], "fc", **QUICK)
    feature_robustness(Twice(how).double(), DATA["mlp"], "head", deltas=0.1, **QUICK)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a layer that does not exist": ({"layer": "fc"}, UnknownNameError, "'fc'"),
    "no layer": ({"layer": ""}, UnknownNameError, "layer ''"),
    "a layer that is no name": ({"layer": 2}, OptionError, "layer=2"),
    "an activation": ({"layer": "1"}, ParameterError, "'1', a ReLU"),
    "a bias": ({"layer": "2.bias"}, ParameterError, "'2.bias'"),
    "a delta of zero": ({"deltas": [0.1, 0.0]}, OptionError, "deltas=0.0"),
    "a negative delta": ({"deltas": -1.0}, OptionError, "deltas=-1.0"),
    "an infinite delta": ({"deltas": [math.inf]}, OptionError, "deltas=inf"),
    "a delta that is not a number": ({"deltas": [math.nan]}, OptionError, "deltas=nan"),
    "a truth value": ({"deltas": True}, OptionError, "deltas=True"),
    "no deltas": ({"deltas": []}, OptionError, "deltas of type list"),
    "deltas that are text": ({"deltas": "0.1"}, OptionError, "deltas of type str"),
    "no deltas at all": ({"deltas": None}, OptionError, "NoneType"),
    "a delta whose square overflows": ({"deltas": [0.1, 1e300]}, OptionError, "deltas=1e+300"),
    "a number in an array": ({"deltas": np.array(0.1)}, OptionError, "deltas of type ndarray"),
    "deltas in two axes": ({"deltas": np.ones((2, 2))}, OptionError, "deltas of type ndarray"),
    "a matrix that is a little too large": ({"matrix": (1 + 1e-8) * torch.eye(9).double()}, OptionError, "1.00000001"),
    "a matrix of another shape": ({"matrix": torch.eye(7)}, OptionError, "(9, 9)"),
    "a matrix that is none": ({"matrix": [[1.0]]}, OptionError, "a list"),
    "a matrix that is too large": ({"matrix": 1.5 * torch.eye(9)}, OptionError, "norm 1.5"),
    "a matrix with NaN": ({"matrix": torch.full((9, 9), math.nan)}, NonFiniteError, "NaN"),
    "another norm": ({"norm": "nuclear"}, UnknownNameError, "frobenius"),
    "one draw": ({"draws": 1}, OptionError, "draws=1"),
    "no steps": ({"steps": 0}, OptionError, "steps=0"),
    "negative restarts": ({"restarts": -1}, OptionError, "restarts=-1"),
    "no choice": ({"per_example": 1}, OptionError, "per_example=1"),
    "no seed": ({"seed": -1}, OptionError, "seed=-1"),
    "no memory": ({"memory": "much"}, OptionError, "memory"),
    "half precision": ({"dtype": torch.float16}, ModelError, "float16"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_and_nothing_is_changed(name: str) -> None:
    model = mlp().train()
    options, kind, said = BAD[name]
    before = snapshot(model)
    with pytest.raises(kind, match=re.escape(said)) as caught:
        feature_robustness(model, DATA["mlp"], **{"layer": "2", **options})
    assert isinstance(caught.value, saltflat.SaltflatError)
    assert snapshot(model) == before


def test_a_matrix_of_frobenius_norm_above_one_is_refused_there() -> None:
    options: dict[str, Any] = {"deltas": 0.1, "per_example": False, **QUICK}
    assert feature_robustness(mlp(), DATA["mlp"], "2", matrix=torch.eye(9), **options).points[0].given is not None
    with pytest.raises(OptionError, match="frobenius norm at most 1, but got one of norm 3"):
        feature_robustness(mlp(), DATA["mlp"], "2", matrix=torch.eye(9), norm="frobenius", **options)


def test_an_orthogonal_matrix_may_have_the_rounding_of_its_type() -> None:
    torch.manual_seed(0)
    Q = torch.linalg.qr(torch.randn(9, 9))[0] * (1 + 4e-7)
    size = float(torch.linalg.matrix_norm(Q.double(), 2))
    assert size > 1 + 1e-7
    options: dict[str, Any] = {"deltas": [0.1, 1.0], "per_example": False, **QUICK}
    found = feature_robustness(mlp(), DATA["mlp"], "2", matrix=Q, **options)
    inside = feature_robustness(mlp(), DATA["mlp"], "2", matrix=Q.double() / size, **options)
    assert [point.given for point in found.points] == [point.given for point in inside.points]
    with pytest.raises(OptionError, match=r"norm 1\.000"):
        feature_robustness(mlp(), DATA["mlp"], "2", matrix=Q.double(), **options)


def test_deltas_can_be_numbers_of_numpy_in_any_order() -> None:
    options: dict[str, Any] = {"per_example": False, **QUICK}
    found = feature_robustness(mlp(), DATA["mlp"], "2", deltas=np.array([0.5, 0.25, 0.5]), **options)  # type: ignore[arg-type]
    assert found.deltas.tolist() == [0.25, 0.5]
    one = feature_robustness(mlp(), DATA["mlp"], "2", deltas=np.float32(0.5), **options)  # type: ignore[arg-type]
    assert one.deltas.tolist() == [0.5]


def test_rises_whose_squares_overflow_have_an_infinite_error() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    data = reals(5, 3), reals(5, 1)
    point = feature_robustness(model, data, "weight", "mse", deltas=1e90, per_example=False, **QUICK).points[0]
    assert math.isfinite(point.orthogonal)
    assert point.orthogonal_stderr == math.inf


def test_models_without_second_derivatives_are_refused() -> None:
    case = cubed(CubeOnce)
    with pytest.raises(ModelError, match="once_differentiable"):
        feature_robustness(case.model, case.batches, "0", case.loss, **QUICK)


def test_other_layers_are_refused_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose1d(2, 3, 2), nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(18, 3))
    )
    data = reals(4, 2, 5).float(), torch.arange(4) % 3
    for layer, said in (("0", "a ConvTranspose1d"), ("2", "computed from other parameters")):
        with pytest.raises(ParameterError, match=said):
            feature_robustness(model, data, layer)


@pytest.mark.parametrize("wrong", ["shape", "groups", "list", "NaN", "vector"])
def test_wanted_changes_that_cannot_be_are_refused(wrong: str) -> None:
    weight, change, groups = torch.eye(4), torch.eye(4), 1
    options: dict[str, tuple[Any, Any, Any]] = {
        "shape": (weight, change[:2], groups),
        "groups": (weight, change, 3),
        "list": (weight, change.tolist(), groups),
        "NaN": (weight, change * math.nan, groups),
        "vector": (weight[0], change[0], groups),
    }
    with pytest.raises((OptionError, NonFiniteError)):
        solve_feature_matrix(*options[wrong])


def test_the_default_deltas_run_from_small_to_one() -> None:
    assert DELTAS[0] == 1e-4
    assert DELTAS[-1] == 1
    assert len(DELTAS) == 9
