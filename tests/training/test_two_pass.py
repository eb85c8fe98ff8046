"""SAM, ASAM and the gradient-norm penalty against their formulas."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Optimizer
from two_pass_cases import (
    BASES,
    KINDS,
    NETWORKS,
    OPTIONS,
    Kind,
    batches,
    loss_of,
    made,
    same,
    train,
)

from saltflat.training import ASAM, SAM, GradientNormPenalty


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_radius_every_step_is_the_bases_bit_for_bit(name: str, base: str, dtype: torch.dtype) -> None:
    plain, model = made(name, dtype), made(name, dtype)
    torch.manual_seed(3)
    train(plain, BASES[base](plain.parameters()), batches(dtype=dtype))
    random = torch.get_rng_state()
    torch.manual_seed(3)
    sam = SAM(model, BASES[base](model.parameters()), rho=0)
    train(model, sam, batches(dtype=dtype))
    same(model, plain)
    assert torch.equal(torch.get_rng_state(), random), "the random stream ends where a plain step's would"
    assert sam.perturbed_steps == 0


def reference(kind: Kind, model: nn.Module, base: Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    """rho=0.3, eta=0.02, balance=0.7, from the formulas alone."""
    named = dict(model.named_parameters())
    for batch in data:
        loss = loss_of(model, batch)
        g = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        T = {
            n: torch.ones_like(w) if kind is not ASAM or n.endswith("bias") else w.detach().abs() + 0.02
            for n, w in named.items()
        }
        length = torch.stack([(T[n] * g[n]).square().sum() for n in named]).sum().sqrt()
        moved = deepcopy(model)
        with torch.no_grad():
            for n, w in moved.named_parameters():
                w.add_(0.3 * T[n] ** 2 * g[n] / length)
        second = torch.autograd.grad(loss_of(moved, batch), list(moved.parameters()))
        for n, grad in zip(named, second, strict=True):
            named[n].grad = 0.3 * g[n] + 0.7 * grad if kind is GradientNormPenalty else grad
        base.step()


@pytest.mark.parametrize("name", ["mlp", "batch norm", "tied"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_the_formula(kind: Kind, base: str, name: str) -> None:
    expected, model = made(name), made(name)
    reference(kind, expected, BASES[base](expected.parameters()), batches())
    optimizer = kind(model, BASES[base](model.parameters()), **OPTIONS[kind])
    train(model, optimizer, batches())
    same(model, expected, 1e-12)
    assert optimizer.perturbed_steps == 20
    if kind is not ASAM:
        assert optimizer.perturbation == pytest.approx(0.3, rel=1e-12)


def test_asam_goes_the_same_way_after_a_layer_is_rescaled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    twin = deepcopy(model)
    with torch.no_grad():
        twin.get_parameter("0.weight").mul_(8)
        twin.get_parameter("2.weight").div_(8)
    moved = []
    for each in (model, twin):
        optimizer = ASAM(each, SGD, lr=0.1, rho=0.5, eta=0)
        loss_of(each, batches()[0]).backward()
        optimizer.first_step()
        moved.append(loss_of(each, batches()[0]).item())
        optimizer.restore()
    assert moved[0] == pytest.approx(moved[1], rel=1e-12)


@pytest.mark.parametrize(("balance", "other"), [(0.0, SGD), (1.0, SAM)])
def test_the_penalty_lies_between_the_base_and_sam(balance: float, other: Any) -> None:
    model, expected = made(), made()
    train(model, GradientNormPenalty(model, SGD, balance=balance, rho=0.05, lr=0.1), batches())
    train(expected, SGD(expected.parameters(), lr=0.1) if other is SGD else SAM(expected, SGD, lr=0.1), batches())
    same(model, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_learning_rate_weights_stay_bit_for_bit(kind: Kind, dtype: torch.dtype) -> None:
    model = made("mlp", dtype)
    before = deepcopy(model)
    optimizer = kind(model, SGD, lr=0.0)
    train(model, optimizer, batches(5, dtype=dtype))
    same(model, before)
    assert optimizer.perturbed_steps == 5


# Parameters of all kinds.


def test_groups_have_their_own_radius() -> None:
    model = made()
    body, head = list(model.get_submodule("0").parameters()), list(model.get_submodule("2").parameters())
    groups: list[dict[str, Any]] = [{"params": body, "rho": 0.5}, {"params": head}]
    sam = SAM(model, SGD(groups, lr=0.0), rho=0.1)
    loss_of(model, batches()[0]).backward()
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    length = sum(float(g.square().sum()) for g in gradients) ** 0.5
    sam.first_step()
    for p, old, g, rho in zip(model.parameters(), before, gradients, (0.5, 0.5, 0.1, 0.1), strict=True):
        torch.testing.assert_close(p.detach() - old, rho * g / length, rtol=1e-9, atol=1e-15)
    assert [group["rho"] for group in sam.base.param_groups] == [0.5, 0.1]


def test_frozen_parameters_and_those_without_a_gradient_stay() -> None:
    model = nn.ModuleDict({"used": made(), "unused": nn.Linear(2, 2)})
    model.get_parameter("used.0.weight").requires_grad_(False)
    before, plain = deepcopy(model), deepcopy(model)
    sam = SAM(model, SGD, lr=0.1, rho=0.0, weight_decay=0.1)
    train(model["used"], sam, batches(3))
    trained = [p for _, p in plain.named_parameters() if p.requires_grad]
    train(plain["used"], SGD(trained, 0.1, weight_decay=0.1), batches(3))
    same(model, plain)
    for name in ("used.0.weight", "unused.weight", "unused.bias"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_only_one_pass_uses_is_no_trouble(kind: Kind) -> None:
    one, two = nn.Linear(3, 1), nn.Linear(3, 1)
    model = nn.ModuleList([one, two])
    optimizer = kind(model, SGD, lr=1.0)
    before = deepcopy(model)
    one(torch.ones(3)).sum().backward()
    optimizer.first_step()
    two(torch.ones(3)).sum().backward()
    optimizer.second_step()
    first, second = (0.2, 0.8) if kind is GradientNormPenalty else (0.0, 1.0)
    for index, share in enumerate((first, second)):
        change = model.get_parameter(f"{index}.weight") - before.get_parameter(f"{index}.weight")
        torch.testing.assert_close(change, torch.full((1, 3), -share))


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_gradient_moves_nothing_and_is_not_counted(kind: Kind) -> None:
    model = made()
    before = deepcopy(model)
    optimizer = kind(model, SGD, lr=0.1)
    train(model, optimizer, batches(1))
    assert optimizer.perturbed_steps == 1
    model.load_state_dict(before.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0 * loss_of(model, batches()[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    same(model, before)
    assert (optimizer.perturbed_steps, optimizer.perturbation) == (1, 0.0)


def test_weights_of_mixed_and_of_low_precision_move_by_the_radius() -> None:
    model = nn.Sequential(nn.Linear(8, 6).bfloat16(), nn.Tanh())
    head = nn.Linear(6, 3)
    sam = SAM(nn.ModuleList([model, head]), SGD, lr=0.1, rho=0.5)
    x, y = batches(dtype=torch.float32)[0]

    def closure() -> Tensor:
        sam.zero_grad()
        loss = F.cross_entropy(head(model(x.bfloat16()).float()), y)
        loss.backward()
        return loss

    sam.step(closure)
    assert sam.perturbation == pytest.approx(0.5, rel=1e-2)


# BatchNorm and other buffers.


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, momentum=None),
        nn.SyncBatchNorm(6),
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
        spectral_norm(nn.Linear(6, 6)),
    ],
    ids=["batch", "cumulative", "over processes", "instance", "spectral"],
)
def test_running_statistics_are_those_of_a_plain_step(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), deepcopy(norm), nn.Linear(6, 3)).double()
    plain = deepcopy(model)
    train(model, SAM(model, SGD, lr=0.1, rho=0.5), batches(1))
    train(plain, SGD(plain.parameters(), lr=0.1), batches(1))
    found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    assert found
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
