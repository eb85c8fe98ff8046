"""Where optimizers become unstable: thresholds and preconditioners against torch's own steps and dense matrices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from saltflat.integrations import Monitor, Record
from saltflat.integrations.flatness_callback import OptimizerSnapshot
from saltflat.integrations.stability import StabilityMatrix, compute_stability_matrix
from saltflat.training import ASAM, SAM, GradientNormPenalty

SIZES = (2, 3)


class Parabola(nn.Module):
    """Two parameters on a parabola with a Hessian that is not diagonal, so small that squares of gradients vanish."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (nn.Parameter(1e-100 * torch.randn(size, dtype=torch.float64)) for size in SIZES)

    def set_gradient(self, hessian: Tensor) -> None:
        gradient = hessian @ torch.cat([self.one.detach(), self.two.detach()])
        self.one.grad, self.two.grad = gradient.split(SIZES)

    def length(self) -> float:
        return float(torch.cat([self.one, self.two]).detach().norm())


def hessian() -> Tensor:
    root = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return root @ root.mT


def flat(values: Mapping[str, Tensor | float], model: nn.Module) -> Tensor:
    return torch.cat(
        [torch.as_tensor(values[name]).double().expand(p.shape).flatten() for name, p in model.named_parameters()]
    )


def dense(found: StabilityMatrix, model: nn.Module, hessian: Tensor) -> float:
    """The largest eigenvalue of all of the matrix."""
    scale = flat(found.rates, model).sqrt()
    matrix = found.sign * hessian + torch.diag(flat(found.decays, model))
    return float(torch.linalg.eigvalsh(scale[:, None] * matrix * scale)[-1])


# Second moments that stay what they are: a beta of nearly 1, after so many steps that nothing of the start is left.
STILL, LATE = 1 - 1e-13, 1e15


def frozen(optimizer: Optimizer) -> None:
    """Give it a preconditioner, which then stays."""
    generator = torch.Generator().manual_seed(2)
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            for key in ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta"):
                state[key] = torch.rand(p.shape, dtype=torch.float64, generator=generator) + 0.5
            state["max_exp_avg_sq"] += 1  # never below the average itself
            for key in ("exp_avg", "grad_avg", "momentum_buffer"):
                state[key] = torch.zeros_like(p)
            state["step"], state["mu_product"] = torch.tensor(LATE), torch.tensor(0.0)


Make = Callable[[Parabola], Optimizer]


def groups(model: Parabola, one: dict[str, Any], two: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": [model.one], **one}, {"params": [model.two], **two}]


OPTIMIZERS: dict[str, tuple[Make, float]] = {
    "SGD": (lambda m: SGD(m.parameters(), lr=0.1), 2.0),
    "decayed": (lambda m: SGD(m.parameters(), lr=0.1, weight_decay=3.0), 2.0),
    "heavy ball": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), 3.8),
    "heavy ball, decayed": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.5, weight_decay=2.0), 3.0),
    "dampened": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.6, dampening=0.2), 4.0),
    "Nesterov": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), 3.8 / 2.8),
    "foreach": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True), 3.8),
    "lr is a tensor": (lambda m: SGD(m.parameters(), lr=torch.tensor(0.1), momentum=0.5), 3.0),
    "several rates": (lambda m: SGD(groups(m, {"lr": 0.3}, {"lr": 0.05, "weight_decay": 1.0}), 0.1), 2.0),
    "several momenta": (
        lambda m: SGD(groups(m, {"momentum": 0.9}, {"momentum": 0.2, "lr": 0.3}), 0.1, dampening=0.1),
        2.4 / 0.9,
    ),
    "heavy ball beside Nesterov": (
        lambda m: SGD(groups(m, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}), 0.1),
        3.8 / 2.8,
    ),
    "one group alone": (lambda m: SGD([m.two], lr=0.1, momentum=0.9), 3.8),
    "Adam": (lambda m: Adam(m.parameters(), lr=0.1, betas=(0.9, STILL)), 38.0),
    "Adam, decayed": (lambda m: Adam(m.parameters(), lr=0.1, betas=(0.5, STILL), weight_decay=2.0), 6.0),
    "AMSGrad": (lambda m: Adam(m.parameters(), lr=0.1, betas=(0.8, STILL), amsgrad=True), 18.0),
    "fused": (lambda m: Adam(m.parameters(), lr=0.1, betas=(0.9, STILL), fused=True), 38.0),
    "AdamW": (lambda m: AdamW(m.parameters(), lr=0.1, betas=(0.9, STILL), weight_decay=5.0), 38 * 0.75),
    "several betas": (
        lambda m: AdamW(groups(m, {"betas": (0.9, STILL)}, {"betas": (0.3, STILL), "lr": 0.02}), 0.1, weight_decay=1.0),
        26 / 7 * 0.99,
    ),
    "NAdam": (lambda m: NAdam(m.parameters(), lr=0.1, betas=(0.9, STILL)), 2 / (0.1 + 0.9 / 19)),
    "RAdam": (lambda m: RAdam(m.parameters(), lr=0.1, betas=(0.9, STILL)), 38.0),
    "Adamax": (lambda m: Adamax(m.parameters(), lr=0.1, betas=(0.9, STILL), eps=0.0), 38.0),
    "RMSprop": (lambda m: RMSprop(m.parameters(), lr=0.1, alpha=STILL, momentum=0.9), 3.8),
    "centered RMSprop": (lambda m: RMSprop(m.parameters(), lr=0.1, alpha=STILL, centered=True), 2.0),
    "Adagrad": (lambda m: Adagrad(m.parameters(), lr=0.1), 2.0),
    "Adadelta": (lambda m: Adadelta(m.parameters(), lr=0.1, rho=STILL), 2.0),
}


def scaled_to(value: float, found: StabilityMatrix, model: nn.Module) -> Tensor:
    """A Hessian for which the largest eigenvalue of the optimizer's matrix is this."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if dense(found, model, middle * hessian()) < value else (low, middle)
    return low * hessian()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_own_steps_converge_below_the_threshold_and_diverge_above(name: str) -> None:
    make, expected = OPTIMIZERS[name]
    for ratio in (0.98, 1.02):
        model = Parabola()
        optimizer = make(model)
        if not isinstance(optimizer, SGD):
            frozen(optimizer)
        found = compute_stability_matrix(optimizer, model)
        assert isinstance(found, StabilityMatrix)
        assert found.threshold == pytest.approx(expected, rel=1e-9)
        curved = scaled_to(ratio * expected, found, model)
        lengths = []
        for step in range(1201):
            if step % 600 == 0:
                lengths.append(model.length())
            model.set_gradient(curved)
            optimizer.step()
        # What moves; a parameter that the optimizer does not have stays.
        assert lengths[2] > 3 * lengths[1] if ratio > 1 else lengths[2] <= lengths[1] * (1 + 1e-12), lengths


def test_an_optimizer_that_maximizes_sees_the_hessian_upside_down() -> None:
    for ratio in (0.98, 1.02):
        model = Parabola()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=1.0, maximize=True)
        found = compute_stability_matrix(optimizer, model)
        assert isinstance(found, StabilityMatrix)
        curved = -scaled_to(ratio * 3, StabilityMatrix(found.rates, found.decays, 1, 3.0), model)
        assert dense(found, model, curved) == pytest.approx(ratio * 3)
        for _ in range(1500):
            model.set_gradient(curved)
            optimizer.step()
        assert (model.length() > 1e-95) == (ratio > 1)


# The preconditioner is that of the steps that were really taken, from the first on.


def mean(optimizer: Optimizer, p: Tensor) -> Tensor:
    found: Tensor = optimizer.state[p]["exp_avg"]
    return found


def gradient(_: Optimizer, p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def nadams(optimizer: Optimizer, p: Tensor) -> Tensor:
    (group,), state = optimizer.param_groups, optimizer.state[p]
    t, one = float(state["step"]), group["betas"][0]
    now, after = (one * (1 - 0.5 * 0.96 ** (n * group["momentum_decay"])) for n in (t, t + 1))
    product = float(state["mu_product"])
    direct, averaged = (1 - now) / (1 - product), after / (1 - product * after)
    found: Tensor = direct * gradient(optimizer, p) + averaged * mean(optimizer, p)
    return found


MOVES: dict[str, tuple[Make, Callable[[Optimizer, Tensor], Tensor]]] = {
    "Adam": (lambda m: Adam(m.parameters(), lr=0.1, eps=0.1), mean),
    "AMSGrad": (lambda m: Adam(m.parameters(), lr=0.1, amsgrad=True), mean),
    "fused": (lambda m: Adam(m.parameters(), lr=0.1, fused=True), mean),
    "AdamW": (lambda m: AdamW(m.parameters(), lr=0.1, weight_decay=0.0), mean),
    "NAdam": (lambda m: NAdam(m.parameters(), lr=0.1), nadams),
    "RAdam": (lambda m: RAdam(m.parameters(), lr=0.1), mean),
    "Adamax": (lambda m: Adamax(m.parameters(), lr=0.1), mean),
    "RMSprop": (lambda m: RMSprop(m.parameters(), lr=0.1), gradient),
    "centered RMSprop": (lambda m: RMSprop(m.parameters(), lr=0.1, centered=True), gradient),
    "Adagrad": (lambda m: Adagrad(m.parameters(), lr=0.1, lr_decay=0.3, initial_accumulator_value=0.2), gradient),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_step_is_the_rate_times_the_averaged_gradient(name: str) -> None:
    make, along = MOVES[name]
    model, generator = Parabola(), torch.Generator().manual_seed(3)
    optimizer = make(model)
    for _ in range(12):
        before = {each: p.detach().clone() for each, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.randn(p.shape, dtype=torch.float64, generator=generator)
        optimizer.step()
        found = compute_stability_matrix(optimizer, model)
        assert isinstance(found, StabilityMatrix)
        for each, p in model.named_parameters():
            moved = -found.rates[each] * along(optimizer, p)
            torch.testing.assert_close(p.detach() - before[each], moved, rtol=1e-6, atol=1e-12)


# In a monitor, on a network.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(30, 4, generator=generator, dtype=torch.float64), torch.randint(3, (30,), generator=generator)


def dense_hessian(model: nn.Module) -> Tensor:
    inputs, labels = data()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def loss(weights: Tensor) -> Tensor:
        parts = zip(parameters.items(), weights.split(sizes), strict=True)
        named = {name: part.reshape(p.shape) for (name, p), part in parts}
        return F.cross_entropy(functional_call(model, named, (inputs,)), labels)

    return torch.autograd.functional.hessian(loss, torch.cat([p.flatten() for p in parameters.values()]))  # type: ignore[no-any-return]


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 5) -> None:
    inputs, labels = data()
    for _ in range(steps):

        def closure() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def measured(model: nn.Module, optimizer: Any) -> Record:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*by the Gauss-Newton matrix")
        return Monitor(model, data(), optimizer=optimizer).measure()


def by_layer(model: nn.Sequential, first: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), **first}, {"params": model[2].parameters()}]


NETWORKS: dict[str, tuple[Callable[[nn.Sequential], Optimizer], float]] = {
    "Adam": (lambda m: Adam(m.parameters(), lr=0.01, weight_decay=0.1), 38.0),
    "AdamW": (lambda m: AdamW(m.parameters(), lr=0.01), 38 * (1 - 0.01 * 0.01 / 2)),
    "RMSprop": (lambda m: RMSprop(m.parameters(), lr=0.01, momentum=0.5), 3.0),
    "SGD of two groups": (
        lambda m: SGD(by_layer(m, {"lr": 0.3}), 0.1, momentum=0.9),
        3.8,
    ),
    "decayed SGD": (lambda m: SGD(m.parameters(), lr=0.2, weight_decay=0.5, nesterov=True, momentum=0.5), 1.5),
    "SGD of one layer": (lambda m: SGD(m[0].parameters(), lr=0.2), 2.0),
    "maximizing SGD": (lambda m: SGD(m.parameters(), lr=0.2, maximize=True), 2.0),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_record_has_the_eigenvalue_of_the_dense_matrix_and_its_threshold(name: str) -> None:
    make, threshold = NETWORKS[name]
    model = network()
    optimizer = make(model)
    trained(model, optimizer)
    record = measured(model, optimizer)
    found = compute_stability_matrix(optimizer, model)
    assert isinstance(found, StabilityMatrix)
    expected = dense(found, model, dense_hessian(model))
    assert record.values["flatness/lr_lambda_max"] == pytest.approx(expected, rel=2e-3)
    assert record.values["flatness/lr_lambda_max_threshold"] == pytest.approx(threshold)
    assert not [note for note in record.notes if "lr_lambda_max" in note]


def test_a_parameter_without_a_gradient_so_far_does_not_move() -> None:
    model = network()
    optimizer = Adam(model.parameters(), lr=0.01)
    for p in model[0].parameters():
        p.requires_grad_(False)
    trained(model, optimizer)
    for p in model[0].parameters():
        p.requires_grad_(True)
    found = compute_stability_matrix(optimizer, model)
    assert isinstance(found, StabilityMatrix)
    assert found.rates["0.weight"] == 0.0
    expected = dense(found, model, dense_hessian(model))
    assert measured(model, optimizer).values["flatness/lr_lambda_max"] == pytest.approx(expected, rel=2e-3)


class Own(Adam):
    """May do anything."""


class Around:
    """As Lookahead is: another optimizer inside, and steps of its own."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer, self.param_groups = inner, inner.param_groups


@pytest.mark.parametrize(
    ("make", "steps", "said"),
    [
        (lambda m: Adam(m.parameters()), 0, "Adam has taken no step yet"),
        (lambda m: Adagrad(m.parameters()), 0, "Adagrad has taken no step yet"),
        (lambda m: Own(m.parameters()), 2, "how Own scales its steps is not known"),
        (lambda m: torch.optim.Rprop(m.parameters()), 2, "how Rprop scales"),
        (lambda m: Around(SGD(m.parameters(), lr=0.1)), 0, "how Around scales"),
        (lambda m: SGD(network().parameters(), lr=0.1), 0, "SGD has none of the parameters"),
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=1.0), 2, "not stable for any curvature"),
        (
            lambda m: SGD(by_layer(m, {"maximize": True}), lr=0.1),
            2,
            "some groups of SGD maximize",
        ),
    ],
)
def test_where_no_threshold_is_known_a_note_says_so(make: Callable[[nn.Module], Any], steps: int, said: str) -> None:
    model = network()
    optimizer = make(model)
    if steps:
        trained(model, optimizer, steps)
    record = measured(model, optimizer)
    assert [said in note for note in record.notes if "lr_lambda_max" in note] == [True]
    assert not [name for name in record.values if "lr_lambda_max" in name]
    assert "flatness/lambda_max" in record.values


@pytest.mark.parametrize("kind", [SAM, ASAM, GradientNormPenalty])
def test_sam_and_its_kin_have_no_threshold(kind: Callable[..., Optimizer]) -> None:
    model = network()
    optimizer = kind(model, SGD, lr=0.1, momentum=0.9)
    trained(model, optimizer, 2)
    record = measured(model, optimizer)
    assert record.values["flatness/lr_lambda_max"] == pytest.approx(0.1 * record.values["flatness/lambda_max"])
    assert "flatness/lr_lambda_max_threshold" not in record.values
    assert any("no threshold: " in note and "changes the gradient" in note for note in record.notes)


def test_a_schedule_that_steps_between_the_step_and_the_call_changes_nothing() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    stepped = OptimizerSnapshot(optimizer)
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(0.5)
    optimizer.param_groups[0]["momentum"] = 0.0
    found = compute_stability_matrix(stepped, model)
    assert isinstance(found, StabilityMatrix)
    assert found.uniform_rate_and_decay is not None
    assert found.uniform_rate_and_decay[0] == pytest.approx(0.1)
    assert found.threshold == pytest.approx(3.8)


def test_a_rate_of_zero_is_far_from_the_edge() -> None:
    model = network()
    for optimizer in (SGD(model.parameters(), lr=0.0), Adam(model.parameters(), lr=0.0)):
        trained(model, optimizer, 1)
        assert measured(model, optimizer).values["flatness/lr_lambda_max"] == 0
    found = compute_stability_matrix(SGD(model.parameters(), lr=0.1, momentum=0.5, dampening=1.0), model)
    assert isinstance(found, StabilityMatrix)
    assert found.threshold == inf  # no gradient but the first is ever used
