"""Slices through the loss: against a slow loop over copies of the network, and what rescaling does to them."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from cases import CASES
from promise_cases import FaultError, network, snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

import saltflat
from saltflat.errors import (
    CoupledExamplesError,
    EmptyDataError,
    ModelError,
    NonFiniteError,
    OptionError,
    ParameterError,
    ReportError,
    SaltflatError,
    UnknownNameError,
)
from saltflat.landscape import Landscape, plot_together
from saltflat.landscape.landscape import SliceGrid
from saltflat.results import Report

Direction = Mapping[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mlp(bias: bool = True, act: type[nn.Module] = nn.ReLU) -> Any:
    net = nn.Sequential(nn.Linear(4, 6, bias), act(), nn.Linear(6, 5, bias), act(), nn.Linear(5, 3, bias))
    return net.double()


def cnn() -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    ).double()


def normed() -> Any:
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)),
    ).double()
    with torch.no_grad():
        for _ in range(5):
            net(torch.randn(30, 1, 4, 4).double())
    return net


def rows(count: int = 11) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4).double(), torch.randint(3, (count,))


def images(count: int = 11) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 4, 4).double(), torch.randint(3, (count,))


def batches(data: tuple[Tensor, Tensor], size: int = 4) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(each.split(size) for each in data), strict=True))


def noise(net: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(value) for name, value in net.named_parameters()}


def slow(
    net: nn.Module,
    data: tuple[Tensor, Tensor],
    directions: Sequence[Direction],
    places: Sequence[Tensor],
    loss: Loss = F.cross_entropy,
    prepare: Callable[[nn.Module], object] = lambda net: None,
) -> Tensor:
    """The definition: at every point the weights are written into a copy, which is run on all the data."""
    found = []
    for place in torch.cartesian_prod(*places).reshape(-1, len(places)):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for name, value in other.named_parameters():
                for x, direction in zip(place, directions, strict=True):
                    value.add_(x * direction.get(name, torch.zeros_like(value)))
            prepare(other)
            other.eval()
            found.append(loss(other(data[0]), data[1]))
    return torch.stack(found).reshape([len(each) for each in places])


def line(points: int, radius: float) -> Tensor:
    return torch.linspace(-radius, radius, points, dtype=torch.float64)


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    one, two = (each.detach().numpy() if isinstance(each, Tensor) else np.array(each) for each in (found, expected))
    np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


# Against the slow loop.


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("memory", ["1GiB", "20kB"])
def test_a_slice_is_what_a_loop_over_copies_gives(make: Callable[[], nn.Module], dimensions: int, memory: str) -> None:
    net = make()
    data = rows() if make is mlp else images()
    directions = [noise(net) for _ in range(dimensions)]
    found = saltflat.compute_landscape(
        net, batches(data), directions=directions, dimensions=dimensions, points=7, radius=0.8, memory=memory
    )
    same(found.losses, slow(net, data, directions, [line(7, 0.8)] * dimensions))
    assert found.errors is not None
    same(found.errors, slow(net, data, directions, [line(7, 0.8)] * dimensions, wrong))
    for places in found.coordinates:
        same(places, line(7, 0.8))
        assert places[3] == 0
    assert found.loss == float(found.losses[(3,) * dimensions])
    same(found.loss, F.cross_entropy(net(data[0]), data[1]).detach())
    assert found.error == float(wrong(net(data[0]), data[1]))
    assert found.examples == 11


def test_points_are_run_together_where_that_is_possible() -> None:
    found = saltflat.compute_landscape(mlp(), rows(), points=9)
    assert found.settings["strategy"] == "points together"


class Deciding(nn.Module):
    """Looks at a number, which cannot be done for many weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inside(x)
        return y if float(self.inside.weight.detach().sum()) > 0 else -y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x.reshape(-1, 2, 2))[0][:, -1])
        return y


@pytest.mark.parametrize("make", [Deciding, Recurrent])
def test_a_model_that_cannot_be_mapped_is_run_point_by_point(make: Callable[[], nn.Module]) -> None:
    net, data = make().double(), rows()
    directions = [noise(net)]
    found = saltflat.compute_landscape(net, data, directions=directions, points=5)
    assert found.settings["strategy"] == "point by point"
    same(found.losses, slow(net, data, directions, [line(5, 1.0)]))


class Moody(nn.Module):
    """Can be mapped for two examples, and not for more: it reads a number, whatever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inside(x)
        return y if len(x) <= 2 or float(y.detach().sum()) > -1e9 else -y


def test_a_model_that_can_be_mapped_only_at_first_gives_the_same() -> None:
    net, data = Moody().double(), rows()
    directions = [noise(net)]
    found = saltflat.compute_landscape(net, data, directions=directions, points=5)
    same(found.losses, slow(net, data, directions, [line(5, 1.0)]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:.*nested.*", "ignore:.*enable_nested_tensor")
def test_the_middle_of_every_case_is_the_loss_that_measure_finds(name: str) -> None:
    case = CASES[name]()
    before = snapshot(case.model)
    found = saltflat.compute_landscape(case.model, case.batches, case.loss, points=3, radius=0.1, biases="include")
    expected = saltflat.compute_statistics(case.model, case.batches, names="curvature_trace", loss=case.loss).loss
    assert found.loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert snapshot(case.model) == before


def test_float32_is_worked_in_and_dtype_changes_it() -> None:
    net, data = cnn(), images()
    exact = saltflat.compute_landscape(net, data, points=5)
    single = saltflat.compute_landscape(net.float(), (data[0].float(), data[1]), points=5)
    assert single.settings["dtype"] == "float32"
    same(single.losses, exact.losses, 1e-4)
    double = saltflat.compute_landscape(net, (data[0].float(), data[1]), points=5, dtype=torch.float64)
    assert double.settings["dtype"] == "float64"
    same(double.losses, exact.losses, 1e-5)  # weights were rounded once
    assert next(net.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("mse", F.mse_loss),
        ("bce_with_logits", F.binary_cross_entropy_with_logits),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), ignore_index=1), None),
        (lambda outputs, targets: (outputs - targets).abs().mean(), F.l1_loss),
    ],
)
def test_every_loss_has_slices(name: Any, loss: Loss | None) -> None:
    net, (inputs, labels) = mlp(), rows()
    targets = labels if loss is None else torch.rand(11, 3).double()
    directions = [noise(net)]
    found = saltflat.compute_landscape(net, batches((inputs, targets)), name, directions=directions, points=5)
    same(found.losses, slow(net, (inputs, targets), directions, [line(5, 1.0)], loss or name))
    assert (found.errors is None) == (loss in (F.mse_loss, F.l1_loss))


def test_errors_leave_ignored_targets_out() -> None:
    net, (inputs, labels) = mlp(), rows()
    found = saltflat.compute_landscape(net, (inputs, labels), nn.CrossEntropyLoss(ignore_index=1), points=3)
    kept = labels != 1
    assert found.error == pytest.approx(float(wrong(net(inputs[kept]), labels[kept])))


def test_losses_that_overflow_are_kept() -> None:
    net, data = mlp(), rows()
    found = saltflat.compute_landscape(net, data, directions=[noise(net)], points=5, radius=1e200)
    assert np.isfinite(found.losses).tolist() == [False, False, True, False, False]
    assert found.errors is not None
    assert np.isnan(found.errors).tolist() == np.isnan(found.losses).tolist()
    assert "At 4 of 5 points the loss is not finite." in str(found)
    squares = saltflat.compute_landscape(
        net, (data[0], torch.zeros(11, 3).double()), "mse", directions=[noise(net)], points=3, radius=1e100
    )
    assert squares.losses[0] == np.inf
    assert Landscape.from_dict(json.loads(json.dumps(squares.to_dict(), allow_nan=False))) == squares
    for each in (found, squares):
        each.plot().savefig(io.BytesIO(), format="png")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{"dimensions": 2}, {"directions": "eigenvectors"}, {"batch_norm": "recompute"}])
def test_a_gpu_gives_what_a_cpu_gives(options: dict[str, Any]) -> None:
    net, data = normed(), images(12)
    here = saltflat.compute_landscape(net, data, points=5, **options)
    there = saltflat.compute_landscape(net.cuda(), (data[0].cuda(), data[1].cuda()), points=5, **options)
    same(there.losses, here.losses, 1e-9)


# Directions.


def moved_by(net: nn.Module, data: Any, name: str, **options: Any) -> Tensor:
    """The direction of one parameter, found from outside: a loss that is one entry of it is linear along a slice."""
    value = dict(net.named_parameters())[name]
    found = []
    for entry in range(value.numel()):

        class Reading(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: Tensor, entry: int = entry) -> Tensor:
                own = dict(self.net.named_parameters())[name].reshape(-1)[entry]
                return own.expand(len(x), 1) + 0 * x.reshape(len(x), -1)[:, :1]

        slopes = saltflat.compute_landscape(
            Reading(), (data[0], torch.zeros(len(data[0]), 1).double()), lambda y, t: y.mean(), points=3, **options
        ).losses
        found.append((slopes[2] - slopes[0]) / 2)
    return torch.tensor(found).reshape(value.shape)


def test_filters_of_random_directions_are_as_long_as_those_of_the_weights() -> None:
    net, data = cnn(), images(2)
    conv, linear = net[0].weight.detach(), net[5].weight.detach()
    for name, weight in (("0.weight", conv), ("5.weight", linear)):
        direction = moved_by(net, data, name)
        same(direction.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
        assert direction.flatten(1)[:, :2].unique().numel() > 2
    assert not moved_by(net, data, "0.bias").any()
    same(moved_by(net, data, "0.bias", biases="include").abs(), net[0].bias.detach().abs())


def test_filters_of_transposed_convolutions_are_their_output_channels() -> None:
    net: Any = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(6 * 4, 3)).double()
    data = torch.randn(2, 4, 1, 1).double(), torch.tensor([0, 1])
    weight = net[0].weight.detach()
    direction = moved_by(net, data, "0.weight")
    for group in (0, 1):  # (in, out / groups, ...): an output channel is a column of its group's rows
        own = slice(2 * group, 2 * group + 2)
        same(direction[own].transpose(0, 1).flatten(1).norm(dim=1), weight[own].transpose(0, 1).flatten(1).norm(dim=1))


@pytest.mark.parametrize("normalize", ["layer", "entry", "length"])
def test_random_directions_are_normalised_as_asked(normalize: str) -> None:
    net, data = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double(), rows(3)
    data = data[0][:, :3], data[1] % 2
    weights = dict(net.named_parameters())
    parts = {
        name: moved_by(net, data, name, directions="random", normalize=normalize) for name in ("0.weight", "2.weight")
    }
    lengths = {name: float(each.norm()) for name, each in parts.items()}
    if normalize == "length":
        assert sum(each**2 for each in lengths.values()) == pytest.approx(1)
        assert saltflat.compute_landscape(net, data, directions="random", points=3).directions[0][
            "length"
        ] == pytest.approx(1)
    elif normalize == "layer":
        assert lengths == pytest.approx({name: float(each.detach().norm()) for name, each in weights.items()})
    else:
        plain = {
            name: moved_by(net, data, name, directions="random", normalize="none") for name in ("0.weight", "2.weight")
        }
        for name, each in parts.items():
            same(each, plain[name] * weights[name].detach().abs())


def test_random_directions_belong_to_the_seed_and_the_second_is_another() -> None:
    net, data = mlp(), rows()
    one, again, other = (saltflat.compute_landscape(net, data, dimensions=2, points=3, seed=seed) for seed in (1, 1, 2))
    assert one.losses.tolist() == again.losses.tolist() != other.losses.tolist()
    assert one.losses[:, 1].tolist() != one.losses[1].tolist()
    assert one.losses[:, 1].tolist() == saltflat.compute_landscape(net, data, points=3, seed=1).losses.tolist()
    assert any("not orthogonalized" in note for note in one.notes)


def test_dead_filters_do_not_move_and_do_no_harm() -> None:
    net, data = mlp(), rows()
    with torch.no_grad():
        net[0].weight[2] = 0
    direction = moved_by(net, data, "0.weight")
    assert not direction[2].any()
    assert direction[1].all()


def test_only_the_layers_asked_for_move() -> None:
    net, data = mlp(), rows()
    net[0].requires_grad_(False)
    assert not moved_by(net, data, "0.weight", directions="random", normalize="none").any()
    found = saltflat.compute_landscape(net, data, layers="2", points=3)
    assert found.settings["layers"] == ["2.weight", "2.bias"]


def hessian(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """All second derivatives of the mean loss, entry by entry."""
    values = {name: each.detach() for name, each in net.named_parameters()}
    sizes = [each.numel() for each in values.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = zip(values.items(), flat.split(sizes), strict=True)
        weights = {name: part.reshape(each.shape) for (name, each), part in parts}
        return F.cross_entropy(torch.func.functional_call(net, weights, data[0]), data[1])

    found: Tensor = torch.autograd.functional.hessian(loss, torch.cat([each.flatten() for each in values.values()]))
    return found


def test_the_curvature_along_eigenvectors_of_length_one_is_the_eigenvalue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    net, data = mlp(act=nn.Tanh), rows()
    values = torch.linalg.eigvalsh(hessian(net, data)).flip(0)[:2]
    found = saltflat.compute_landscape(
        net, batches(data), directions="eigenvectors", dimensions=2, points=3, radius=1e-3
    )
    told = [float(each["eigenvalue"]) for each in found.directions]
    assert told == pytest.approx(values.tolist(), rel=1e-7)
    assert list(found.curvature) == pytest.approx(told, rel=1e-4)
    assert [each["length"] for each in found.directions] == pytest.approx([1, 1])
    # The mixed second difference of two eigenvectors is zero.
    mixed = (found.losses[2, 2] - found.losses[2, 0] - found.losses[0, 2] + found.losses[0, 0]) / 4e-6
    assert abs(mixed) < 1e-4 * told[0]
    assert "eigenvector 1 (eigenvalue" in str(found)


def test_a_second_eigenvalue_below_zero_is_found() -> None:
    """The loss -(a^2) / 2 - b^2 has the eigenvalues -1 and -2."""

    class Hill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.tensor([0.3, 0.2]).double())

        def forward(self, x: Tensor) -> Tensor:
            return (self.place * torch.tensor([1.0, 2.0**0.5]).double()).expand(len(x), 2) + 0 * x

    data = torch.zeros(3, 2).double(), torch.zeros(3, 2).double()
    found = saltflat.compute_landscape(
        Hill(), data, lambda y, t: -y.square().sum(1).mean() / 2, directions="eigenvectors", dimensions=2, points=3
    )
    assert [each["eigenvalue"] for each in found.directions] == pytest.approx([-1, -2])
    assert found.curvature == pytest.approx((-1, -2))


def test_eigenvectors_can_be_normalised_by_filter() -> None:
    net, data = mlp(), rows()
    found = saltflat.compute_landscape(net, data, directions="eigenvectors", normalize="filter", points=3)
    norms = [each.detach() for each in net.parameters()]
    assert found.directions[0]["length"] == pytest.approx(float(torch.cat([each.flatten() for each in norms]).norm()))


def test_a_given_direction_may_leave_parameters_out_and_name_buffers() -> None:
    net, data = normed(), images()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    found = saltflat.compute_landscape(net, data, directions=[state], points=3, radius=0.5)
    directions: list[Direction] = [dict(net.named_parameters())]
    same(found.losses, slow(net, data, directions, [line(3, 0.5)]))
    assert any("buffers" in note for note in found.notes)
    only = {"0.weight": state["0.weight"]}
    found = saltflat.compute_landscape(net, data, directions=[only], points=3)
    same(found.losses, slow(net, data, [only], [line(3, 1.0)]))


def test_tied_weights_move_as_one() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).double()
    net[2].weight = net[0].weight
    data = rows()
    direction = {name: torch.randn(4, 4).double() for name in ["0.weight"]}
    found = saltflat.compute_landscape(net, data, directions=[direction], points=3)
    same(found.losses, slow(net, data, [direction], [line(3, 1.0)]))
    assert saltflat.compute_landscape(
        net, data, directions=[{"2.weight": direction["0.weight"]}], points=3
    ).losses.tolist() == (found.losses.tolist())


# BatchNorm.


def test_batch_norm_uses_the_statistics_that_the_model_keeps() -> None:
    net, data = normed(), images(12)
    directions = [noise(net)]
    found = saltflat.compute_landscape(net, batches(data), directions=directions, points=5)
    same(found.losses, slow(net, data, directions, [line(5, 1.0)]))
    assert any("eval mode" in note for note in found.notes)


@pytest.mark.parametrize("memory", ["1GiB", "20kB"])
@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [5, 5, 2]])
def test_recomputed_statistics_are_those_of_torch_at_every_point(memory: str, sizes: list[int]) -> None:
    net, data = normed(), images(12)
    net[7] = nn.Identity()  # torch's own function drops at random
    cut: list[tuple[Tensor, Tensor]] = list(zip(*(each.split(sizes) for each in data), strict=True))
    directions = [noise(net), noise(net)]
    found = saltflat.compute_landscape(
        net, cut, directions=directions, dimensions=2, points=3, batch_norm="recompute", memory=memory
    )
    expected = slow(net, data, directions, [line(3, 1.0)] * 2, prepare=lambda other: update_bn(cut, other))
    same(found.losses, expected)
    plain = saltflat.compute_landscape(net, cut, directions=directions, dimensions=2, points=3)
    assert abs(found.loss - plain.loss) > 1e-3
    assert any("recomputed at every point" in note for note in found.notes)


def test_recomputing_leaves_dropout_alone() -> None:
    net, data = normed(), images(12)
    other = copy.deepcopy(net)
    other[7] = nn.Identity()
    with_, without = (saltflat.compute_landscape(each, data, points=3, batch_norm="recompute") for each in (net, other))
    assert with_.losses.tolist() == without.losses.tolist()


def test_a_layer_used_twice_counts_its_batches_as_torch_does() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.norm(self.first(self.norm(x))))
            return y

    net, data = Twice().double(), rows(12)
    directions = [noise(net)]
    found = saltflat.compute_landscape(net, batches(data), directions=directions, points=3, batch_norm="recompute")
    expected = slow(net, data, directions, [line(3, 1.0)], prepare=lambda other: update_bn(batches(data), other))
    same(found.losses, expected)


def test_without_batch_norm_there_is_nothing_to_recompute() -> None:
    net, data = mlp(), rows()
    found = saltflat.compute_landscape(net, data, points=3, batch_norm="recompute")
    assert any("no BatchNorm" in note for note in found.notes)
    assert found.losses.tolist() == saltflat.compute_landscape(net, data, points=3).losses.tolist()


def test_a_batch_of_one_example_has_no_statistics() -> None:
    with pytest.raises(ModelError, match="batch size"):
        saltflat.compute_landscape(normed(), batches(images(5), 4), points=3, batch_norm="recompute")


# What rescaling does.


SLICES: dict[str, dict[str, Any]] = {
    "length": {"directions": "random"},
    "filter": {"directions": "filter"},
    "layer": {"directions": "random", "normalize": "layer"},
    "entry": {"directions": "random", "normalize": "entry"},
    "eigenvectors": {"directions": "eigenvectors"},
}
# A unit's factor is in the filters of the next layer, too: their lengths mix the factors of all units they read from.
UNMOVED = {
    "layer": {"filter", "layer", "entry"},
    "unit": {"entry"},
    "before BatchNorm": {"filter", "entry"},
}


@pytest.mark.parametrize("kind", ["layer", "unit"])
@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("biases", ["ignore", "include"])
def test_a_slice_is_changed_by_exactly_the_rescalings_it_should(
    kind: Literal["layer", "unit"], name: str, bias: bool, biases: Literal["ignore", "include"]
) -> None:
    net, data = mlp(bias), rows()
    other = saltflat.rescale(net, data[0], kind=kind, seed=3)
    one, two = (saltflat.compute_landscape(each, data, biases=biases, **SLICES[name]) for each in (net, other))
    assert one.loss == pytest.approx(two.loss, rel=1e-10)
    if name in UNMOVED[kind]:
        same(one.losses, two.losses, 1e-8)
    else:
        assert np.abs(one.losses - two.losses).max() > 1e-3


@pytest.mark.parametrize("batch_norm", ["running", "recompute"])
@pytest.mark.parametrize("name", SLICES)
def test_batch_norm_absorbs_factors_that_filters_and_entries_know(
    batch_norm: Literal["running", "recompute"], name: str
) -> None:
    """What the filters of Li et al. are for: behind BatchNorm no other layer has to make up for them."""
    net, data = normed(), images(12)
    for each in (net[1], net[5]):
        each.eps = 1e-30
    other = copy.deepcopy(net)
    with torch.no_grad():
        for layer, norm in ((0, 1), (4, 5)):
            factors = torch.rand(len(other[layer].weight)).double() * 5 + 0.1
            other[layer].weight.mul_(factors.reshape(-1, *[1] * (other[layer].weight.dim() - 1)))
            other[norm].running_mean.mul_(factors)
            other[norm].running_var.mul_(factors**2)
    one, two = (saltflat.compute_landscape(each, data, batch_norm=batch_norm, **SLICES[name]) for each in (net, other))
    if name in UNMOVED["before BatchNorm"]:
        same(one.losses, two.losses, 1e-8)
    else:
        assert np.abs(one.losses - two.losses).max() > 1e-3


# The model comes back.

DATA = torch.randn(7, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0])
CALLS: dict[str, dict[str, Any]] = {
    "filter": {"dimensions": 2},
    "eigenvectors": {"directions": "eigenvectors"},
    "recompute": {"batch_norm": "recompute", "memory": "40kB"},
    "float64": {"dtype": torch.float64, "biases": "include"},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_slice_leaves_everything_as_it_was(call: str) -> None:
    net = network()
    before = snapshot(net)
    saltflat.compute_landscape(net, DATA, points=3, **CALLS[call])
    assert snapshot(net) == before


@pytest.mark.parametrize("call", CALLS)
def test_a_fault_leaves_everything_as_it_was(call: str) -> None:
    net = network()
    bomb: Any = net[3]
    bomb.left["forward"] = 10_000
    saltflat.compute_landscape(net, DATA, points=3, **CALLS[call])
    passes = 10_000 - int(bomb.left["forward"])
    for survived in {0, 1, 2, passes // 2, passes - 2, passes - 1}:
        bomb.left["forward"] = survived
        before = snapshot(net)
        with pytest.raises((FaultError, ModelError)):
            saltflat.compute_landscape(net, DATA, points=3, **CALLS[call])
        assert snapshot(net) == before


def test_an_error_of_the_callers_own_function_is_told_as_it_is() -> None:
    def stop(step: str, done: int, total: int | None) -> None:
        raise KeyError(step)

    net = network()
    before = snapshot(net)
    with pytest.raises(KeyError, match="Examples at points"):
        saltflat.compute_landscape(net, DATA, points=3, progress=stop)
    assert snapshot(net) == before


def test_progress_counts_examples_at_points() -> None:
    seen: list[tuple[str, int, int | None]] = []
    saltflat.compute_landscape(mlp(), rows(), points=5, memory="20kB", progress=lambda *each: seen.append(each))
    assert seen[-1] == ("Examples at points", 55, 55)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"points": 4}, OptionError, "points=4"),
        ({"points": 1}, OptionError, "points=1"),
        ({"points": 5.0}, OptionError, "points=5.0"),
        ({"radius": 0}, OptionError, "radius=0"),
        ({"radius": -1.0}, OptionError, "radius=-1"),
        ({"radius": float("nan")}, OptionError, "radius=nan"),
        ({"dimensions": 3}, OptionError, "dimensions=3"),
        ({"dimensions": 0}, OptionError, "dimensions=0"),
        ({"directions": "filters"}, UnknownNameError, "Try 'filter'"),
        ({"directions": "given"}, UnknownNameError, "'given'"),
        ({"directions": 3}, OptionError, "int"),
        ({"directions": {"0.weight": torch.ones(6, 4)}}, OptionError, "a list of one mapping"),
        ({"directions": []}, OptionError, "0 directions"),
        ({"directions": [{}, {}]}, OptionError, "dimensions=2"),
        ({"directions": [{}]}, ParameterError, "zero everywhere"),
        ({"directions": [{"0.weights": torch.ones(6, 4)}]}, UnknownNameError, "Try '0.weight'"),
        ({"directions": [{"0.weight": torch.ones(4, 6)}]}, OptionError, r"\(4, 6\)"),
        ({"directions": [{"0.weight": 1.0}]}, OptionError, "a float"),
        ({"directions": [{"0.weight": torch.full((6, 4), torch.nan)}]}, NonFiniteError, "0.weight"),
        ({"directions": [{"0.weight": torch.ones(6, 4)}], "layers": "2"}, OptionError, "not among"),
        ({"normalize": "layer"}, OptionError, "directions='random'"),
        ({"directions": "random", "normalize": "filers"}, UnknownNameError, "Try 'filter'"),
        ({"biases": True}, UnknownNameError, "ignore"),
        ({"batch_norm": "fresh"}, UnknownNameError, "recompute"),
        ({"memory": "lots"}, OptionError, "memory"),
        ({"seed": -1}, OptionError, "seed=-1"),
        ({"layers": "nowhere"}, UnknownNameError, "nowhere"),
        ({"layers": "0.bias"}, ParameterError, "biases='include'"),
        ({"loss": "entropy"}, UnknownNameError, "cross_entropy"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[SaltflatError], told: str) -> None:
    with pytest.raises(error, match=told) as caught:
        saltflat.compute_landscape(mlp(), rows(), **options)
    assert re.match(r"Expected .*, but got ", str(caught.value), re.DOTALL)


def test_bad_models_and_data_are_named() -> None:
    net, data = mlp(), rows()
    with pytest.raises(EmptyDataError):
        saltflat.compute_landscape(net, (data[0][:0], data[1][:0]))
    with pytest.raises(EmptyDataError, match="ignored"):
        saltflat.compute_landscape(net, (data[0], torch.full((11,), -100)))
    with pytest.raises(ParameterError):
        saltflat.compute_landscape(nn.Sequential(nn.ReLU()), data)
    with pytest.raises(NonFiniteError):
        saltflat.compute_landscape(net, (data[0] * torch.nan, data[1]))
    with pytest.raises(ModelError, match="inputs"):
        saltflat.compute_landscape(net, (data[0][:, :3], data[1]))
    with pytest.raises(CoupledExamplesError):
        saltflat.compute_landscape(
            nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), cnn()).double(), images()
        )
    with pytest.raises(ParameterError, match="dimensions=1"):
        saltflat.compute_landscape(
            nn.Linear(1, 1, bias=False).double(),
            (torch.ones(3, 1).double(), torch.ones(3, 1).double()),
            "mse",
            directions="eigenvectors",
            dimensions=2,
        )


def test_a_middle_that_is_not_finite_is_an_error() -> None:
    net, data = mlp(), rows()
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        saltflat.compute_landscape(net, data)
    with pytest.raises(NonFiniteError):
        saltflat.compute_landscape(mlp(), data, lambda outputs, targets: outputs.sum() * float("inf"))
    # Only examples far behind the first overflow.
    late = data[0].clone()
    late[-1] = 1e308
    net = mlp()
    with torch.no_grad():
        net[0].weight.mul_(100)
    with pytest.raises(NonFiniteError, match="examples 0 to 10"):
        saltflat.compute_landscape(net, (late, data[1]))


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(x, self.centres, p=3.0)  # torch differentiates it once


def test_a_model_without_second_derivatives_has_no_eigenvectors() -> None:
    with pytest.raises(ModelError, match="directions='filter'"):
        saltflat.compute_landscape(Centres().double(), rows(), directions="eigenvectors", points=3)


def test_second_derivatives_that_torch_gets_wrong_are_noticed() -> None:
    norm = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(norm(nn.Linear(4, 3)), nn.Tanh(), norm(nn.Linear(3, 3))).double()
    with pytest.raises(ModelError, match="wrong"):
        saltflat.compute_landscape(net, rows(), directions="eigenvectors", points=3)


def test_a_loss_without_curvature_says_that_its_eigenvectors_mean_nothing() -> None:
    net = nn.Linear(4, 3, bias=False).double()
    found = saltflat.compute_landscape(net, rows(), lambda y, t: y.sum(1).mean(), directions="eigenvectors", points=3)
    assert any("is 0" in note for note in found.notes)


# The result.


@pytest.fixture
def found() -> Landscape:
    return saltflat.compute_landscape(mlp(), rows(), dimensions=2, points=5)


def test_a_landscape_comes_back_from_its_file(found: Landscape, tmp_path: Path) -> None:
    path = found.save(tmp_path / "landscape.json")
    again = Landscape.load(path)
    assert again == found
    assert again.losses.tolist() == found.losses.tolist()
    assert again.curvature == found.curvature
    assert str(again) == str(found)
    json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda constant: pytest.fail(constant))
    assert Landscape.from_dict(found.to_dict()) == found
    with pytest.raises(ReportError, match="not a report but a landscape"):
        Report.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"coordinates": []},
        {"coordinates": [[-1.0, 0.0, 1.0]]},
        {"losses": [[1.0] * 5] * 3},
        {"losses": "many"},
        {"errors": [[2.0] * 5] * 5},
        {"directions": []},
        {"directions": [{"kind": "odd", "length": 1.0, "normalize": "none"}] * 2},
        {"directions": [{"kind": "given", "length": 1.0}] * 2},
        {"examples": 0},
        {"examples": "11"},
        {"extra": 1},
        {"losses": [[{"$float": "nan"}] * 5] * 5},
    ],
)
def test_a_file_that_makes_no_sense_is_refused(found: Landscape, change: dict[str, Any]) -> None:
    with pytest.raises(ReportError, match="cannot be understood"):
        Landscape.from_dict({**found.to_dict(), **change})
    with pytest.raises(ReportError, match=r"saltflat\.landscape/9"):
        Landscape.from_dict({**found.to_dict(), "schema": "saltflat.landscape/9"})


def test_nothing_in_a_landscape_can_be_changed(found: Landscape) -> None:
    with pytest.raises(ValueError, match="read-only"):
        found.losses[0] = 0
    with pytest.raises(AttributeError):
        found.seconds = 0.0  # type: ignore[misc]


def test_it_prints_what_a_reader_needs(found: Landscape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = str(found)
    for told in ("5 x 5 points", "11 examples", "random direction 2 (by filter)", "curvature", "cosine"):
        assert told in text
    assert "<Landscape of Sequential" in repr(found)
    page = found._repr_html_()
    assert "random direction 1" in page
    assert "<script" not in page


def test_curvature_is_the_second_difference_along_each_axis() -> None:
    """The loss of this network is (x^2 + (2 y)^2) / 2 + x y around zero."""
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.zero_()
    data = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double(), torch.zeros(2, 1).double()
    axes = [{"weight": torch.tensor([each]).double()} for each in ([1.0, 0.0], [0.0, 1.0])]
    found = saltflat.compute_landscape(net, data, "mse", directions=axes, dimensions=2, points=5)
    assert found.curvature == pytest.approx((1.0, 4.0))
    assert found.losses[0, 1] == pytest.approx((1 + 4 * 0.25) / 2), "the first axis is the first direction"


def test_grids_have_their_middle_at_the_weights() -> None:
    grid = SliceGrid(2, 5, 0.3)
    assert grid.places[grid.middle].tolist() == [0, 0]
    assert grid.places[grid.neighbors].tolist() == [[0, 0], [0, pytest.approx(0.15)], [pytest.approx(0.15), 0]]


def test_curves_and_maps_are_drawn(found: Landscape, tmp_path: Path) -> None:
    figure: Any = found.plot()
    axis = figure.axes[0]
    assert axis.get_xlabel() == "random direction 1 (by filter)"
    assert axis.get_ylabel() == "random direction 2 (by filter)"
    assert figure.axes[1].get_ylabel() == "mean loss"
    for number, each in enumerate((figure, found.plot(log=True), found.plot("error", levels=3))):
        each.savefig(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000
    curve = saltflat.compute_landscape(mlp(), rows(), points=5)
    plotted: Any = curve.plot()
    (drawn,) = [each for each in plotted.axes[0].lines if len(each.get_xdata()) == 5]
    assert drawn.get_ydata().tolist() == curve.losses.tolist()
    together: Any = plot_together({"one": curve, "two": curve, "$three$": curve})
    assert [each.get_text() for each in together.axes[0].get_legend().get_texts()] == ["one", "two", "$three$"]
    together.savefig(tmp_path / "together.svg")


def test_the_first_direction_goes_to_the_right(found: Landscape) -> None:
    """A plane that rises along the first direction only has upright contours."""
    ramp = dataclasses.replace(found, losses=np.repeat(found.coordinates[0][:, None], 5, axis=1) + 2)
    figure: Any = ramp.plot(levels=4)
    contours = figure.axes[0].collections[1]
    for path in contours.get_paths():
        if len(path.vertices):
            assert np.ptp(path.vertices[:, 0]) < 1e-9


def test_flat_gapped_and_overflowing_landscapes_are_drawn(found: Landscape, tmp_path: Path) -> None:
    flat = dataclasses.replace(found, losses=np.ones((5, 5)))
    gaps = found.losses.copy()
    gaps[0], gaps[4, 4] = np.nan, np.inf
    for each in (flat, dataclasses.replace(found, losses=gaps), dataclasses.replace(found, losses=np.zeros((5, 5)))):
        each.plot().savefig(tmp_path / "map.png")
    flat.plot(log=True).savefig(tmp_path / "map.png")


def test_what_cannot_be_drawn_is_named(found: Landscape) -> None:
    with pytest.raises(OptionError, match="two dimensions"):
        plot_together([found])
    with pytest.raises(OptionError, match="no landscapes"):
        plot_together([])
    with pytest.raises(UnknownNameError, match="Try 'error'"):
        found.plot("errors")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="levels"):
        found.plot(levels=0)
    with pytest.raises(OptionError, match="log="):
        found.plot(log="yes")  # type: ignore[arg-type]
    targets = torch.zeros(11, 3).double()
    without = saltflat.compute_landscape(mlp(), (rows()[0], targets), "mse", points=3)
    with pytest.raises(OptionError, match="what='loss'"):
        without.plot("error")


def test_the_code_of_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent.parent / "docs" / "landscape.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    known: dict[str, Any] = {}
    exec(block, known)
    assert eval("plane.losses[5, 5] == plane.loss and Landscape.load('map.json') == plane", known)
    assert {path.name for path in tmp_path.iterdir()} == {"curve.png", "map.png", "map.json", "both.png"}


# Where names are found.


def test_public_names_are_few_and_others_are_in_their_package() -> None:
    import saltflat.symmetry as symmetry

    assert len(saltflat.__all__) <= 21
    assert all(hasattr(saltflat, name) for name in saltflat.__all__)
    for name in ("canonicalize", "equal_up_to_rescaling"):
        assert hasattr(symmetry, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(saltflat, name)


def test_a_limit_takes_the_first_examples() -> None:
    torch.manual_seed(0)
    net, data = nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(2, (9,)))
    few = saltflat.compute_landscape(net, (data[0][:4], data[1][:4]), points=3)
    assert saltflat.compute_landscape(net, data, points=3, limit=4).loss == few.loss
