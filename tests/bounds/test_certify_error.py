"""Certificates: every term against its definition, validity in simulations, invariance, and refusals."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from math import inf, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bound_oracle import CAP, compute_diagonal, compute_risk, sample_risks
from cases import Net
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binom
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from saltflat.bounds import Bound, compute_bounds, compute_gaussian_kl
from saltflat.bounds import posterior as posterior_module
from saltflat.bounds.certify_error import certify_error
from saltflat.bounds.distributions import Gaussian
from saltflat.bounds.posterior import Posterior
from saltflat.bounds.seen import Fingerprints
from saltflat.bounds.stochastic import BoundedLoss, RandomNetwork
from saltflat.errors import (
    DataError,
    DeviceError,
    LabelError,
    ModelError,
    NonFiniteError,
    OneShotDataError,
    OptionError,
    SaltflatError,
    UnknownNameError,
)
from saltflat.symmetry import canonicalize
from saltflat.symmetry.rescale import rescale

F64 = torch.float64
Data = tuple[Tensor, Tensor]
GRID = [2.0 ** (k / 4) for k in range(-56, 17)]  # the scales a prior may have
DELTA = 0.05
module = import_module("saltflat.bounds.certify_error")


def make_data(examples: int = 120, inputs: int = 3, classes: int = 3, seed: int = 0) -> Data:
    """Classes that a linear function of the inputs separates."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, inputs, generator=dice, dtype=F64)
    return x, (x[:, 0] > 0.3).long() * (classes > 2) + (x[:, 1] > 0).long()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double().eval()


def train(model: nn.Module, data: Data, steps: int = 60, lr: float = 0.05) -> Any:
    """Return a trained copy."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    for p in model.parameters():
        p.grad = None
    return model


def make_mlp(hidden: int = 5, classes: int = 3, inputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@dataclass
class Trace:
    """What the search for a posterior received and found."""

    centers: list[Mapping[str, Tensor]] = field(default_factory=list)
    curvatures: list[Mapping[str, Tensor]] = field(default_factory=list)
    starts: list[Posterior] = field(default_factory=list)
    found: list[Posterior] = field(default_factory=list)


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    choose, descend = module.choose_posterior, module.descend_bound

    def record_choice(network: Any, center: Any, curvature: Any, *args: Any) -> Any:
        trace.centers.append(center)
        trace.curvatures.append(curvature)
        return choose(network, center, curvature, *args)

    def record_descent(network: Any, start: Posterior, *args: Any, **options: Any) -> Posterior:
        trace.starts.append(start)
        trace.found.append(descend(network, start, *args, **options))
        return trace.found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose_posterior", record_choice)
        patch.setattr(module, "descend_bound", record_descent)
        yield trace


def solve_kl(q: float, budget: float) -> float:
    """The largest p with kl(q, p) <= budget, by bracketing."""

    def divergence(p: float) -> float:
        return (q * log(q / p) if q else 0.0) + (1 - q) * log((1 - q) / (1 - p))

    return float(brentq(lambda p: divergence(p) - budget, max(q, 1e-300), 1 - 1e-16, xtol=1e-16, rtol=1e-15))


def name_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


# Every term


@pytest.mark.parametrize("of", ["error", "clipped_cross_entropy"])
@pytest.mark.parametrize("case", ["zero", "initial", "trained", "descent"])
def test_every_term_is_its_definition(case: str, of: BoundedLoss) -> None:
    data, initial = make_data(), seeded(make_mlp)
    model = train(initial, data)
    prior_model = {"initial": initial, "trained": train(initial, (data[0][:40], data[1][:40]), 20)}.get(case)
    options: dict[str, Any] = {} if prior_model is None else {"prior": prior_model, "prior_data": "none"}
    if case == "trained":
        options["prior_data"] = range(40)
    if case == "descent":
        options |= {"epochs": 3, "move": True, "lr": 1e-2}
    used = (data[0][40:], data[1][40:]) if case == "trained" else data
    m, draws = len(used[0]), 3
    with traced() as trace:
        bound = certify_error(model, data, of=of, delta=DELTA, draws=draws, **options)
    terms = bound.terms
    canonical = canonicalize(model, data[0][:2])
    own = name_values(canonical)
    center = (
        {name: torch.zeros_like(each) for name, each in own.items()}
        if prior_model is None
        else name_values(canonicalize(prior_model, data[0][:2]))
    )
    curvature = compute_diagonal(canonical, used)
    for name, value in own.items():
        torch.testing.assert_close(trace.centers[0][name], center[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(trace.curvatures[0][name], curvature[name], rtol=1e-9, atol=1e-12)
        if case != "descent":
            torch.testing.assert_close(trace.found[0].weights.mean[name], value, rtol=1e-10, atol=1e-12)
    found = trace.found[0]
    kls = {
        name: float(
            kl_divergence(
                Normal(found.weights.mean[name], found.weights.deviation[name]), Normal(center[name], scale)
            ).sum()
        )
        for name, scale in found.scales.items()
    }
    assert bound.details["kl"] == pytest.approx(kls, rel=1e-10)
    assert terms["KL divergence (nats)"] == pytest.approx(sum(kls.values()), rel=1e-10)
    assert all(min(abs(scale / each - 1) for each in GRID) < 1e-12 for scale in found.scales.values())
    # One scale for all tensors, or one for each, and which of the two.
    choices = 1 if len(set(found.scales.values())) == 1 else len(found.scales)
    cost = log(4) + choices * log(len(GRID))
    assert terms["choice of the prior's scales (nats)"] == pytest.approx(cost, rel=1e-12)
    assert terms["risk of the network itself"] == pytest.approx(compute_risk(canonical, used, of), rel=1e-10)
    risks = sample_risks(canonical, found.weights, used, of, 2000)
    # The difference of two means, each with a standard deviation of its own.
    spread = sqrt(0.25 / (m * draws)) if of == "error" else 0.5 / sqrt(m * draws)
    assert abs(terms["risk of random networks"] - float(risks.mean())) < 4 * (spread + float(risks.std()) / sqrt(2000))
    mean = terms["risk of random networks"]
    upper = solve_kl(mean, log(1 / (0.1 * DELTA)) / (m * draws))
    assert terms["Monte Carlo margin"] == pytest.approx(upper - mean, rel=1e-9)
    confidence = log(2 * sqrt(m) / (0.9 * DELTA))
    assert terms["confidence (nats)"] == pytest.approx(confidence, rel=1e-12)
    budget = (sum(kls.values()) + cost + confidence) / m
    assert bound.value == pytest.approx(solve_kl(upper, budget), rel=1e-10)
    without_kl = solve_kl(upper, (cost + confidence) / m)
    assert terms["added by confidence and choice"] == pytest.approx(without_kl - upper, rel=1e-8)
    assert terms["added by the KL divergence"] == pytest.approx(bound.value - without_kl, rel=1e-8, abs=1e-12)
    assert bound.chance == pytest.approx(2 / 3 if of == "error" else log(3) / CAP, rel=1e-12)
    assert bound.examples == m
    if case == "trained":
        assert prior_model is not None
        tested = compute_risk(prior_model, used, of)
        assert bound.details["prior_risk"] == pytest.approx(tested, rel=1e-10)
        exact = binom.cdf(round(tested * m), m, bound.details["holdout"]) if of == "error" else DELTA
        assert exact == pytest.approx(DELTA, rel=1e-8), "so few errors have probability delta there"
        looser = solve_kl(tested, log(1 / DELTA) / m)
        assert bound.details["holdout"] <= looser * (1 + 1e-10)
        assert of == "error" or bound.details["holdout"] == pytest.approx(looser, rel=1e-10)
    else:
        assert "holdout" not in bound.details


def test_closed_form_is_the_minimum_found_by_brute_force() -> None:
    data = make_data(60)
    model = train(seeded(lambda: make_mlp(2)), data)
    with traced() as trace:
        bound = certify_error(model, data, draws=1)
    found = trace.found[0]
    strength = bound.details["strength"] * len(data[0])
    mean, curvature = name_values(canonicalize(model, data[0][:2])), trace.curvatures[0]

    def find_least(mu: float, h: float, s: float) -> tuple[float, float]:
        """The least cost of one weight, and its deviation."""

        def cost(log_deviation: float) -> float:
            d = float(np.exp(log_deviation))
            return float(0.5 * (strength * h * d * d + (d * d + mu * mu) / s**2 - 1 - 2 * log(d / s)))

        best = minimize_scalar(cost, bounds=(-20, 5), method="bounded", options={"xatol": 1e-10})
        return float(best.fun), float(np.exp(best.x))

    table = {
        name: [
            [
                find_least(float(mu), float(h), s)
                for mu, h in zip(mean[name].flatten(), curvature[name].flatten(), strict=True)
            ]
            for s in GRID
        ]
        for name in mean
    }
    costs = {name: np.array([sum(cost for cost, _ in row) for row in rows]) for name, rows in table.items()}
    shared, own = np.sum(list(costs.values()), 0).argmin(), {name: each.argmin() for name, each in costs.items()}
    one = sum(each[shared] for each in costs.values()) + log(4 * len(GRID))
    many = sum(each[own[name]] for name, each in costs.items()) + log(4) + len(costs) * log(len(GRID))
    expected = own if many < one else dict.fromkeys(costs, shared)
    for name, number in expected.items():
        assert found.scales[name] == pytest.approx(GRID[number], rel=1e-12)
        deviations = torch.tensor([d for _, d in table[name][number]], dtype=F64)
        torch.testing.assert_close(found.weights.deviation[name].flatten(), deviations, rtol=1e-6, atol=0)
        exact = (1 / GRID[number] ** 2 + strength * curvature[name]).rsqrt()
        torch.testing.assert_close(found.weights.deviation[name], exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_gradient_of_the_descent_is_that_of_its_objective(shared: bool) -> None:
    data = make_data(80)
    model = train(seeded(lambda: make_mlp(2)), data, 10)
    m = len(data[0])
    checked: list[int] = []
    calls: list[Any] = []
    run = RandomNetwork.run

    def record_run(self: Any, batch: Any, weights: Any, noise: Any) -> Tensor:
        if torch.is_grad_enabled() and isinstance(weights.mean, dict) and weights.deviation["0.weight"].requires_grad:
            calls.append((self, batch, noise))
        return run(self, batch, weights, noise)

    class Checker(torch.optim.SGD):
        """Compares gradients at the first step with finite differences, and stays where it is."""

        def __init__(self, groups: Any) -> None:
            super().__init__(groups, lr=0.0)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if checked:
                return
            (network, batch, noise), names = calls[0], list(start.weights.mean)
            first, means = self.param_groups[0]["params"], self.param_groups[1]["params"]
            ratios, free = first[: len(names)], first[len(names) :]
            scales = free if len(free) > 1 else free * len(names)

            def compute(values: Mapping[str, Tensor] | None = None) -> tuple[float, float, float]:
                with torch.no_grad():
                    mean = dict(zip(names, means, strict=True))
                    wide = {n: (a + b).exp() for n, a, b in zip(names, ratios, scales, strict=True)}
                    outputs = run(network, batch, Gaussian(mean, wide), noise)
                    kl = sum(
                        float(kl_divergence(Normal(mean[n], wide[n]), Normal(torch.zeros_like(mean[n]), s.exp())).sum())
                        for n, s in zip(names, scales, strict=True)
                    )
                    error = float((outputs.argmax(1) != batch.targets).double().mean())
                    return error, float(F.cross_entropy(outputs, batch.targets)), kl

            risk, entropy, kl = compute()
            assert 1 / m < risk < 0.9
            high = solve_kl(risk, (kl + log(2 * sqrt(m) / DELTA)) / m)
            trade = log(high * (1 - risk) / (risk * (1 - high)))
            for each in [*ratios, *free, *means]:
                expected = torch.zeros_like(each)
                flat = each.data.view(-1)
                for number in range(flat.numel()):
                    sides, kept = [], float(flat[number])
                    for step in (1e-5, -1e-5):
                        flat[number] = kept + step
                        _, e, k = compute()
                        sides.append(risk / entropy * e + k / (m * trade))
                        flat[number] = kept
                    expected.view(-1)[number] = (sides[0] - sides[1]) / 2e-5
                torch.testing.assert_close(each.grad, expected, rtol=1e-5, atol=1e-8)
                checked.append(each.numel())

    start: Posterior
    descend: Callable[..., Posterior] = module.descend_bound

    def keep_start(network: Any, given: Posterior, *args: Any, **options: Any) -> Posterior:
        nonlocal start
        if not shared:
            given = replace(given, scales={name: GRID[50 + n] for n, name in enumerate(given.scales)})
        start = given
        return descend(network, start, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "descend_bound", keep_start)
        patch.setattr(RandomNetwork, "run", record_run)
        patch.setattr(torch.optim, "Adam", Checker)
        certify_error(model, data, epochs=1, move=True, draws=1)
    different = len(set(start.scales.values()))
    assert different == 1 or not shared
    assert sum(checked) == 17 + different + 17  # deviations, scales of the prior, means


def test_descent_lowers_the_bound_and_never_raises_it() -> None:
    data, initial = make_data(300), seeded(lambda: make_mlp(8))
    model = train(initial, data)
    options: dict[str, Any] = {"prior": initial, "prior_data": "none", "draws": 2}
    closed = certify_error(model, data, **options)
    wide = certify_error(model, data, epochs=40, **options)
    moved = certify_error(model, data, epochs=40, move=True, lr=1e-2, **options)
    assert moved.value < wide.value - 0.01 < closed.value - 0.01
    assert wide.details["moved"] == closed.details["moved"] == 0.0 < moved.details["moved"]
    assert any("away from the weights given" in note for note in moved.notes)
    ruinous = certify_error(model, data, epochs=2, move=True, lr=1.0, **options)
    assert ruinous.value == pytest.approx(closed.value, abs=1e-12)
    assert any("did not lower the bound" in note for note in ruinous.notes)
    assert not any("did not lower the bound" in note for note in moved.notes)


# Validity


def draw_problem(seed: int, examples: int) -> Data:
    """Two normal classes around -1 and 1 along the first of two axes."""
    dice = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (examples,), generator=dice)
    x = torch.randn(examples, 2, generator=dice, dtype=F64)
    x[:, 0] += 2.0 * y - 1
    return x, y


FRESH = draw_problem(10**6, 20_000)


def compute_true_error(weights: Gaussian) -> float:
    """The error of random linear classifiers on new data, in closed form for each of many new examples."""
    (x, y), mean, wide = FRESH, weights.mean, weights.deviation
    margin = x @ (mean["weight"][1] - mean["weight"][0]) + mean["bias"][1] - mean["bias"][0]
    variance = x.square() @ wide["weight"].square().sum(0) + wide["bias"].square().sum()
    return float(Normal(0.0, 1.0).cdf(-(2.0 * y - 1) * margin / variance.sqrt()).mean())


def simulate(seed: int, kind: str, examples: int = 60) -> tuple[float, float, float]:
    """A certificate for a network trained on data of its own: bound, estimate and true error."""
    data = draw_problem(seed, examples)
    initial = seeded(lambda: nn.Linear(2, 2), seed)
    options: dict[str, Any] = {}
    if kind == "trained":
        half = examples // 2
        prior = train(initial, (data[0][:half], data[1][:half]), 15, 0.3)
        options = {"prior": prior, "prior_data": range(half)}
    elif kind in ("initial", "descent"):
        options = {"prior": initial, "prior_data": "none"}
    if kind == "descent":
        options |= {"epochs": 5, "move": True, "lr": 1e-2}
    with traced() as trace, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_unseen", lambda rest, seen: None)  # a linear classifier can be right by luck
        bound = certify_error(train(initial, data, 15, 0.3), data, delta=DELTA, draws=1, seed=seed, **options)
    return bound.value, bound.terms["risk of random networks"], compute_true_error(trace.found[0].weights)


@pytest.mark.parametrize("kind", ["zero", "initial", "trained", "descent"])
def test_bound_holds_on_independent_data_sets(kind: str) -> None:
    found = np.array([simulate(seed, kind) for seed in range(30)])
    bounds, estimates, errors = found.T
    assert (bounds < errors).mean() <= DELTA
    assert bounds.mean() < 0.95
    # The simulation can tell: without the terms for uncertainty, the estimate fails often.
    assert (estimates < errors).mean() > 0.3


def test_bound_of_a_network_that_learned_random_labels_says_nothing() -> None:
    dice = torch.Generator().manual_seed(3)
    x = torch.randn(200, 5, generator=dice, dtype=F64)
    data = x, torch.randint(4, (200,), generator=dice)
    initial = seeded(lambda: make_mlp(30, 4, 5))
    model = train(initial, data, 400, 0.02)
    assert compute_risk(model, data, "error") < 0.2
    settings: list[dict[str, Any]] = [
        {},
        {"prior": initial, "prior_data": "none", "epochs": 5, "move": True},
        {"prior": train(initial, (x[:100], data[1][:100])), "prior_data": range(100)},
    ]
    for options in settings:
        bound = certify_error(model, data, draws=1, **options)
        assert bound.value > 0.9 * bound.chance
        assert bound.is_vacuous
        assert any(note.startswith("What hurts most is ") for note in bound.notes)


# Invariance


def make_lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def make_residual_net() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = h + self.back(torch.relu(self.inner(h)))
        out: Tensor = self.last(torch.relu(h))
        return out

    return Net(forward, first=nn.Linear(3, 5), inner=nn.Linear(5, 4), back=nn.Linear(4, 5), last=nn.Linear(5, 3))


def make_images(examples: int = 60) -> Data:
    dice = torch.Generator().manual_seed(5)
    x = torch.randn(examples, 1, 8, 8, generator=dice, dtype=F64)
    return x, (x[:, 0, :4].mean((1, 2)) > 0).long() + (x[:, 0, 4:].mean((1, 2)) > 0).long()


# Hidden units, as (weights into them, weights out of them, entries of an input per unit).
Units = list[tuple[list[str], list[str], int]]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data], Units]] = {
    "mlp": (make_mlp, make_data, [(["0"], ["2"], 1)]),
    "lenet": (make_lenet, make_images, [(["0"], ["3"], 1), (["3"], ["6"], 4), (["6"], ["8"], 1)]),
    "residual": (
        make_residual_net,
        make_data,
        [(["first", "back"], ["inner", "last"], 1), (["inner"], ["back"], 1)],
    ),
}


def permute(model: nn.Module, units: Units, seed: int) -> nn.Module:
    """A copy with hidden units in another order."""
    new, dice = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for into, out, each in units:
            order = torch.randperm(len(new.get_parameter(f"{into[0]}.bias")), generator=dice)
            for name in into:
                for key in ("weight", "bias"):
                    value = new.get_parameter(f"{name}.{key}")
                    value.copy_(value[order].clone())
            for name in out:
                value = new.get_parameter(f"{name}.weight")
                split = value.unflatten(1, (len(order), each))
                value.copy_(split[:, order].flatten(1, 2).clone())
    return new


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("prior", ["zero", "initial"])
def test_neither_rescaling_nor_permuting_units_changes_the_bound(name: str, prior: str) -> None:
    build, make, units = NETWORKS[name]
    data, initial = make(), seeded(build)
    model = train(initial, data, 30)

    def certify(network: nn.Module, first: nn.Module) -> Bound:
        known = {} if prior == "zero" else {"prior": first, "prior_data": "none"}
        return certify_error(network, data, of="clipped_cross_entropy", draws=1, **known)  # type: ignore[arg-type]

    expected = certify(model, initial)
    assert expected.settings["gauge"] == "canonical"
    x = data[0][:2]
    for seed in (1, 2):
        other, start = (permute(each, units, seed) for each in (model, initial))
        torch.testing.assert_close(other(data[0]), model(data[0]))
        other, start = rescale(other, x, seed, spread=2.0), rescale(start, x, seed + 10, spread=2.0)
        found = certify(other, start)
        assert found.value == pytest.approx(expected.value, rel=1e-6)
        assert found.terms == pytest.approx(expected.terms, rel=1e-6)
    # Noise of one size for all weights does more harm to one of the two networks.
    rises = []
    for each in (model, other):
        rows = compute_bounds(each, data, bounds="isotropic")["isotropic"].details["by_deviation"]
        rises.append({row["deviation"]: row["rise"] for row in rows})
    assert max(abs(rises[0][s] - rises[1][s]) for s in rises[0].keys() & rises[1].keys()) > 0.1


# Bad input


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Check that tensors, modes, hooks, gradients and random states are as before."""

    def take(model: nn.Module) -> list[Any]:
        members = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        values = [
            (n, id(v), v.is_meta or v.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist(), v.requires_grad)
            for n, v in members
        ]
        grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        modules = [
            (n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for n, m in model.named_modules()
        ]
        return [values, grads, modules]

    def take_states() -> list[Any]:
        return [random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()]

    before, states = [take(each) for each in models], take_states()
    yield
    assert [take(each) for each in models] == before
    assert take_states() == states


@dataclass
class Case:
    """A call that must be refused."""

    message: str
    error: type[SaltflatError] = OptionError
    model: Callable[[], nn.Module] | None = None
    data: Callable[[], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    prior: Callable[[nn.Module, Any], dict[str, Any]] | None = None


def case(message: str, error: type[SaltflatError] = OptionError, **options: Any) -> Case:
    keys = ("model", "data", "prior")
    return Case(message, error, **{k: options.pop(k, None) for k in keys}, options=options)


def known(positions: Any) -> Callable[[nn.Module, Any], dict[str, Any]]:
    return lambda model, data: {"prior": seeded(make_mlp), "prior_data": positions}


def told(make: Callable[[Tensor, Tensor], Any]) -> Callable[[nn.Module, Any], dict[str, Any]]:
    return lambda model, data: {"prior": seeded(make_mlp), "prior_data": make(*data)}


class BadBuffer(nn.Module):
    shift: Tensor

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.inner = make_mlp()
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x + self.shift)
        return out


def make_norm_net(track: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=track), nn.ReLU(), nn.Linear(4, 3))


def put_nan(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    return model


def make_positions_net() -> nn.Module:
    return Net(lambda self, x: self.last(x[:, :, None]), last=nn.Linear(1, 3))


def freeze(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


X, Y = make_data()
REFUSALS: dict[str, Case] = {
    "loss not in [0, 1]": case("in \\[0, 1\\]", of="mse"),
    "squared loss": case("a classifier with the loss", loss="mse"),
    "delta 0": case("between 0 and 1, but got delta=0", delta=0),
    "delta 1": case("delta=1.0", delta=1.0),
    "delta nan": case("delta=nan", delta=float("nan")),
    "delta True": case("delta=True", delta=True),
    "delta text": case("delta='x'", delta="x"),
    "draws 0": case("draws=0", draws=0),
    "epochs -1": case("epochs=-1", epochs=-1),
    "move without epochs": case("Try epochs=20", move=True),
    "move 1": case("move=1", move=1),
    "lr 0": case("lr=0", lr=0),
    "lr negative": case("lr=-1.0", lr=-1.0),
    "precision 0": case("precision=0", precision=0),
    "memory": case("memory='much'", memory="much"),
    "columns": case("the choice of columns 'most'", UnknownNameError, columns="most"),
    "limit 0": case("limit=0", limit=0),
    "seed": case("seed=-1", seed=-1),
    "mode": case("'eval' or 'keep'", mode="train"),
    "prior of another type": case("got a float as prior", prior=lambda m, d: {"prior": 1.0}),
    "prior by another name": case("prior='initial'", prior=lambda m, d: {"prior": "initial"}),
    "prior without its data": case("without prior_data=", prior=lambda m, d: {"prior": m}),
    "data of no prior": case("which has seen nothing", prior_data=range(3)),
    "prior data by another name": case("prior_data='nothing'", prior=known("nothing")),
    "prior of another architecture": case(
        "'0.bias' with the shape", ModelError, prior=lambda m, d: {"prior": make_mlp(7), "prior_data": "none"}
    ),
    "incomplete state_dict": case(
        'Missing key\\(s\\) in state_dict: "2.bias"',
        ModelError,
        prior=lambda m, d: {
            "prior": {k: v for k, v in m.state_dict().items() if k != "2.bias"},
            "prior_data": "none",
        },
    ),
    "trained prior said to be new": case(
        "guessing errs on 67%", DataError, prior=lambda m, d: {"prior": m, "prior_data": "none"}
    ),
    "prior of nan": case(
        "NaN", NonFiniteError, prior=lambda m, d: {"prior": put_nan(seeded(make_mlp)), "prior_data": "none"}
    ),
    "repeated positions": case("1 of 3 twice", prior=known([3, 3, 4])),
    "positions out of range": case("from 0 to 119", prior=known(range(60, 121))),
    "negative positions": case("from -1 to 4", prior=known([-1, 4])),
    "real positions": case("whole numbers, but got \\[0.0, 1.0\\]", prior=known([0.0, 1.0])),
    "real positions in a tensor": case("got torch.float32 of shape", prior=known(torch.arange(3.0))),
    "mask": case("mask.nonzero", prior=known(torch.arange(120) < 60)),
    "mask in an array": case("mask.nonzero", prior=known(np.arange(120) < 60)),
    "mask in a list": case("whole numbers", prior=known([True, False])),
    "no positions": case("prior_data='none'", prior=known([])),
    "all positions": case("got all 120 positions", DataError, prior=known(range(120))),
    "positions in batches": case(
        "Try passing the examples themselves", data=lambda: [(X[:60], Y[:60]), (X[60:], Y[60:])], prior=known([0])
    ),
    "prior saw some examples": case("got 20 of 120", DataError, prior=told(lambda x, y: (x[100:], y[100:]))),
    "prior saw them in float32": case("got 120 of 120", DataError, prior=told(lambda x, y: (x.float(), y))),
    "prior saw them in batches": case(
        "got 120 of 120", DataError, prior=told(lambda x, y: [(x[n : n + 7], y[n : n + 7]) for n in range(0, 120, 7)])
    ),
    "prior saw them by name": case("got 120 of 120", DataError, prior=told(lambda x, y: {"x": x, "labels": y})),
    "prior saw them shuffled": case(
        "got 120 of 120",
        DataError,
        prior=told(lambda x, y: DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)),
    ),
    "prior saw a single example": case("got 1 of 120", DataError, prior=told(lambda x, y: (x[5:6], y[5:6]))),
    "prior data read once": case("read only once", OneShotDataError, prior=told(lambda x, y: iter([(x, y)]))),
    "data read once": case("read only once", OneShotDataError, data=lambda: iter([(X, Y)])),
    "more inputs than targets": case("as many inputs as targets", DataError, data=lambda: (X, Y[:50])),
    "more targets than inputs": case(
        "as many inputs as targets", DataError, data=lambda: (X[:50], Y), prior=known([0])
    ),
    "dropout": case(
        "Dropout\\) in train mode",
        ModelError,
        mode="keep",
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double().train(),
    ),
    "BatchNorm in train mode": case(
        "BatchNorm1d\\) in train mode", ModelError, mode="keep", model=lambda: make_norm_net().double().train()
    ),
    "BatchNorm of the batch": case(
        "for example 0 alone", ModelError, model=lambda: make_norm_net(track=False).double()
    ),
    "BatchNorm that other code reads": case(
        "BatchNorm that can be folded",
        ModelError,
        model=lambda: Net(
            lambda self, x: self.last(torch.add(self.norm(x), self.norm.running_mean)),
            norm=nn.BatchNorm1d(3),
            last=nn.Linear(3, 3),
        ).double(),
    ),
    "a label per position": case(
        "one label per example",
        model=lambda: make_positions_net().double(),
        data=lambda: (X, Y[:, None].expand(-1, 3).contiguous()),
    ),
    "ignored labels": case("some that are ignored", data=lambda: (X, Y.where(Y > 0, -100))),
    "labels out of range": case("labels from 1 to 3 for 3 classes", LabelError, data=lambda: (X, Y + 1)),
    "one class": case(
        "at least 2 classes, but got outputs of shape \\(120, 1\\)",
        LabelError,
        model=lambda: seeded(lambda: nn.Linear(3, 1)),
        data=lambda: (X, torch.zeros_like(Y)),
    ),
    "real numbers to predict": case("probabilities that sum to 1", LabelError, data=lambda: (X, 2 * X.abs())),
    "nan weights": case(
        "NaN or infinite numbers in '0.weight'", NonFiniteError, model=lambda: put_nan(seeded(make_mlp))
    ),
    "nan inputs": case("NaN or infinity in batch 0", NonFiniteError, data=lambda: (X / 0 * 0, Y)),
    "all frozen": case("none of which requires a gradient", ModelError, model=lambda: freeze(seeded(make_mlp))),
    "buffers that differ": case(
        "got 'shift', which differs",
        ModelError,
        model=lambda: BadBuffer(1.0).double(),
        prior=lambda m, d: {"prior": BadBuffer(2.0).double(), "prior_data": "none"},
    ),
    "frozen weights that differ": case(
        "got '2.bias', which differs",
        ModelError,
        model=lambda: (lambda m: (m[2].bias.requires_grad_(False), m)[1])(seeded(make_mlp)),
        prior=lambda m, d: {"prior": seeded(make_mlp, 1), "prior_data": "none"},
    ),
    "meta device": case("meta device", DeviceError, model=lambda: make_mlp().to("meta")),
    "prior on the meta device": case(
        "meta device", DeviceError, prior=lambda m, d: {"prior": make_mlp().to("meta"), "prior_data": "none"}
    ),
    "several dtypes": case(
        "must have the same dtype", ModelError, model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3).double())
    ),
    "diverging descent": case("learning rate than lr=1e\\+06", NonFiniteError, epochs=3, move=True, lr=1e6),
    "no draws suffice": case("at most 1,048,576 draws", precision=1e-9),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_gives_one_clear_error(name: str) -> None:
    each = REFUSALS[name]
    model = each.model() if each.model else train(seeded(make_mlp), (X, Y))
    data = each.data() if each.data else (X, Y)
    options = dict(each.options) | (each.prior(model, data) if each.prior else {})
    others = [value for value in options.values() if isinstance(value, nn.Module)]
    model.register_forward_hook(lambda *args: None)
    with untouched(model, *others), pytest.raises(each.error, match=each.message) as caught:
        certify_error(model, data, **options)
    text = str(caught.value)
    assert text.startswith("Expected "), text
    assert text.endswith("."), text
    assert "Try " in text or "Check " in text, text


def test_no_variance_has_no_kl_divergence() -> None:
    one = {"w": torch.ones(2)}
    with pytest.raises(OptionError, match="variance 0 in 'w'"):
        compute_gaussian_kl(one, {"w": torch.tensor([1.0, 0.0])}, one, one)


@pytest.mark.parametrize("sampling", ["layers", "groups"])
def test_suggested_number_of_draws_suffices(sampling: str) -> None:
    model, data = train(seeded(make_mlp), (X, Y)), (X, Y)
    with pytest.MonkeyPatch.context() as patch:
        if sampling == "groups":
            patch.setattr(RandomNetwork, "_can_sample", lambda self, way, batch: way == "groups")
        for precision in (0.05, 0.1):
            with pytest.raises(OptionError, match="Expected enough draws") as caught:
                certify_error(model, data, draws=1, precision=precision)
            needed = int(str(caught.value).split("draws=")[2].split(",")[0])
            bound = certify_error(model, data, draws=needed, precision=precision)
            assert bound.settings["sampling"] == sampling
            assert precision / 4 < bound.terms["Monte Carlo margin"] <= precision
        with pytest.raises(OptionError, match="draws can reach") as caught:
            certify_error(model, data, draws=2, precision=1e-7)
        reached = float(str(caught.value).split("precision=")[2].split(" ")[0])
        assert certify_error(model, data, draws=2, precision=reached).terms["Monte Carlo margin"] <= reached


# Models and data of all kinds


def make_tied_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def make_lstm_net() -> nn.Module:
    return Net(
        lambda self, x: self.last(self.read(x[:, :, None])[0][:, -1]),
        read=nn.LSTM(1, 4, batch_first=True),
        last=nn.Linear(4, 3),
    )


def make_attention_net() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x[:, :, None])
        out: Tensor = self.last(self.mix(h, h, h)[0].mean(1))
        return out

    return Net(forward, first=nn.Linear(1, 4), mix=nn.MultiheadAttention(4, 2, batch_first=True), last=nn.Linear(4, 3))


def make_dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.mark.parametrize("build", [make_tied_net, make_lstm_net, make_attention_net, make_dropout_net, make_norm_net])
@pytest.mark.parametrize("prior", ["zero", "initial", "trained"])
def test_models_of_all_kinds_have_a_bound(build: Callable[[], nn.Module], prior: str) -> None:
    data, initial = (X, Y), seeded(build)
    model = train(initial.train() if build is make_norm_net else initial, data, 30).train()
    options: dict[str, Any] = {"draws": 1}
    if prior == "initial":
        options |= {"prior": initial, "prior_data": "none"}
    elif prior == "trained":
        half = train(initial, (X[:60], Y[:60]), 20)
        options |= {"prior": half.state_dict(), "prior_data": list(range(60)), "epochs": 1, "move": True}
    with untouched(model, initial):
        bound = certify_error(model, data, **options)
    assert bound.terms["risk of random networks"] < bound.value <= 1
    assert bound.kind == "valid"
    assert any("train mode" in note for note in bound.notes)
    assert bound.examples == (60 if prior == "trained" else 120)


def test_folded_batch_norm_is_drawn_even_if_its_layer_is_frozen() -> None:
    model = train(seeded(make_norm_net).train(), (X, Y), 30)
    expected = certify_error(model, (X, Y), draws=1)
    assert list(expected.details["kl"]) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    # The running statistics, and with them the folded weights, depend on the data.
    for frozen in (model[0], model[1]):
        frozen.requires_grad_(False)
        found = certify_error(model, (X, Y), draws=1)
        assert found.value == pytest.approx(expected.value, rel=1e-12)
        assert "All parameters are drawn" in found.assumptions[3].evidence


def test_canonical_form_that_changes_statistics_is_not_used() -> None:
    def build() -> nn.Module:
        norm = nn.InstanceNorm2d(2, affine=True, track_running_stats=True)
        assert norm.running_mean is not None
        norm.running_mean += 0.3
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.ReLU(), pool, nn.Flatten(), nn.Linear(2, 3))

    bound = certify_error(seeded(build), make_images(), draws=1)
    # Scaled with the weights, they would tell the prior about the data.
    assert bound.settings["gauge"] == "given"
    assert any("changes '1.running_mean', which is not drawn" in note for note in bound.notes)
    assert "1.running_mean" in bound.assumptions[3].evidence


def test_scale_of_a_trained_layer_does_not_hide_in_a_frozen_one() -> None:
    initial = seeded(make_mlp)
    initial[2].requires_grad_(False)
    model = train(initial, (X, Y), 30)
    with traced() as trace:
        bound = certify_error(model, (X, Y), draws=1)
    # Nothing but the frozen weights as they are, and so no other scale of the trained ones, is known beforehand.
    for name, value in name_values(model).items():
        if name.startswith("0"):
            torch.testing.assert_close(trace.found[0].weights.mean[name], value)
    assert list(bound.details["kl"]) == ["0.weight", "0.bias"]
    assert bound.assumptions[3].met is None
    assert "2.weight, 2.bias" in bound.assumptions[3].evidence
    larger = copy.deepcopy(model)
    with torch.no_grad():
        larger[0].weight *= 1000
        larger[0].bias *= 1000
    assert certify_error(larger, (X, Y), draws=1).value > bound.value + 0.05
    again = certify_error(model, (X, Y), draws=1, prior=initial, prior_data="none")
    assert list(again.details["kl"]) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("form", ["one logit", "soft", "huge", "one example", "two examples", "labels of one class"])
def test_data_of_all_kinds_have_a_bound(form: str) -> None:
    model = train(seeded(make_mlp), (X, Y))
    data: Data = X, Y
    loss = "cross_entropy"
    if form == "one logit":
        model, data, loss = seeded(lambda: nn.Linear(3, 1)), (X, (Y > 0).double()[:, None]), "bce_with_logits"
    elif form == "soft":
        data = X, F.one_hot(Y, 3) * 0.9 + 0.1 / 3
    elif form == "huge":
        with torch.no_grad():
            for p in model[2].parameters():
                p *= 1e8
    elif form in ("one example", "two examples"):
        count = 1 if form == "one example" else 2
        data = X[:count], Y[:count]
    elif form == "labels of one class":
        data = X, torch.zeros_like(Y)
    for of in ("error", "clipped_cross_entropy"):
        bound = certify_error(model, data, loss, of=of, draws=2, epochs=1)
        outputs = model(data[0]).detach()
        if form == "one logit":
            assert bound.chance == pytest.approx(0.5 if of == "error" else log(2) / CAP)
            own = (
                ((outputs > 0) != (data[1] > 0.5)).double().mean()
                if of == "error"
                else F.binary_cross_entropy_with_logits(outputs, data[1], reduction="none").clamp(0, CAP).mean() / CAP
            )
        else:
            hard = data[1] if form != "soft" else data[1].argmax(1)
            own = (
                (outputs.argmax(1) != hard).double().mean()
                if of == "error"
                else F.cross_entropy(outputs, data[1], reduction="none").clamp(0, CAP).mean() / CAP
            )
        assert bound.terms["risk of the network itself"] == pytest.approx(float(own), rel=1e-10, abs=1e-15)
        assert bound.terms["risk of random networks"] < bound.value <= 1
        assert bound.examples == len(data[0])


class Examples(Dataset[Any]):
    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return X[number], Y[number]

    def __len__(self) -> int:
        return len(X)


FORMS: dict[str, Any] = {
    "dataset": Examples(),
    "loader": DataLoader(Examples(), batch_size=16),
    "shuffled loader": DataLoader(Examples(), batch_size=50, shuffle=True),
    "batches": [(X[n : n + 7], Y[n : n + 7]) for n in range(0, 120, 7)],
    "names": [{"input": X[n : n + 30], "labels": Y[n : n + 30]} for n in range(0, 120, 30)],
}


@pytest.mark.parametrize("of", ["error", "clipped_cross_entropy"])
def test_form_of_the_data_and_memory_do_not_change_the_bound(of: str) -> None:
    model = train(seeded(make_mlp), (X, Y))
    options: dict[str, Any] = {"of": of, "draws": 2, "epochs": 2, "move": True}
    expected = certify_error(model, (X, Y), **options)
    others = {name: certify_error(model, data, **options) for name, data in FORMS.items()}
    others["little memory"] = certify_error(model, (X, Y), memory="8MiB", **options)
    others["less memory"] = certify_error(model, (X, Y), memory="200KiB", **options)
    others["limit"] = certify_error(model, (torch.cat([X, X]), torch.cat([Y, Y])), limit=120, **options)
    for name, found in others.items():
        assert found.value == pytest.approx(expected.value, rel=1e-12), name
        assert found.terms == pytest.approx(expected.terms, rel=1e-10), name
        assert found.details["data"] == expected.details["data"]


def test_positions_and_examples_name_the_same_split() -> None:
    initial, model = seeded(make_mlp), train(seeded(make_mlp), (X, Y))
    prior = train(initial, (X[:40], Y[:40]), 20)
    expected = certify_error(model, (X[40:], Y[40:]), prior=prior, prior_data=(X[:40], Y[:40]), draws=1)
    given: list[Any] = [range(40), list(range(40)), set(range(40)), torch.arange(40), np.arange(39, -1, -1)]
    for positions in given:
        found = certify_error(model, (X, Y), prior=prior, prior_data=positions, draws=1)
        assert found.value == expected.value
        assert found.examples == 80
    dataset = certify_error(model, Examples(), prior=prior, prior_data=range(40), draws=1)
    assert dataset.value == pytest.approx(expected.value, rel=1e-12)
    # The limit counts the examples of the bound, not those of the prior.
    assert certify_error(model, (X, Y), prior=prior, prior_data=range(40), draws=1, limit=30).examples == 30
    coarse = copy.deepcopy(prior).float()
    assert certify_error(model, (X, Y), prior=coarse, prior_data=range(40), draws=1).value == pytest.approx(
        expected.value, rel=1e-3
    )


def test_fingerprints_of_inputs_do_not_depend_on_their_form() -> None:
    numbers = torch.arange(6)
    pairs: list[Any] = [
        {"a": numbers.float(), "b": -numbers.double(), "labels": Y[:6]},
        {"b": -numbers.float(), "a": numbers.int(), "labels": Y[6:12]},
        [((numbers.long()[n : n + 4], -numbers[n : n + 4]), Y[:6][n : n + 4]) for n in (0, 4)],
    ]
    marks = [Fingerprints.compute([each] if isinstance(each, dict) else each).exact for each in pairs]
    assert marks[0] == marks[1] == marks[2]
    assert sum(marks[0].values()) == len(marks[0]) == 6
    swapped = {"a": -numbers.float(), "b": numbers.float(), "labels": Y[:6]}
    assert len(Fingerprints.compute([swapped]).exact & marks[0]) == 1  # zeros


def test_columns_that_are_not_exact_give_another_valid_bound() -> None:
    model = train(seeded(make_mlp), (X, Y))
    exact, top = (certify_error(model, (X, Y), columns=columns, draws=5) for columns in ("exact", "top:2"))
    assert top.settings["columns"] == "top:2"
    assert top.value == pytest.approx(exact.value, abs=0.05)


def test_parameters_of_two_precisions_work_if_the_model_casts() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.first(x)).float())
        return out

    model = Net(forward, first=nn.Linear(3, 4).double(), last=nn.Linear(4, 3))
    bound = certify_error(model, (X, Y), draws=1)
    assert bound.terms["risk of random networks"] < bound.value <= 1


def test_trials_use_examples_from_all_of_the_data() -> None:
    order = Y.argsort()
    seen: list[Tensor] = []
    original = RandomNetwork.run

    def record(self: Any, batch: Any, weights: Any, noise: Any) -> Tensor:
        if noise.seed == 1:  # of the trials
            seen.append(batch.targets)
        return original(self, batch, weights, noise)

    model = train(seeded(make_mlp), (X, Y))
    for data in ((X[order], Y[order]), [(X[order][n : n + 50], Y[order][n : n + 50]) for n in (0, 50, 100)]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(posterior_module, "TRIAL", 12)
            patch.setattr(RandomNetwork, "run", record)
            seen.clear()
            certify_error(model, data, draws=1)
        found = torch.cat(seen)
        assert len(found) > 12
        assert torch.equal(found, Y[order][::10].repeat(len(found) // 12))


def test_seed_determines_the_bound() -> None:
    model = train(seeded(make_mlp), (X, Y))
    options: dict[str, Any] = {"of": "clipped_cross_entropy", "draws": 20}
    one, two = (certify_error(model, (X, Y), seed=3, epochs=1, **options) for _ in range(2))
    assert one.value == two.value
    assert one.terms == two.terms
    values = [certify_error(model, (X, Y), seed=seed, **options) for seed in (0, 50, 2**63 - 1)]
    assert len({each.value for each in values}) == 3
    for each in values[1:]:
        assert each.value == pytest.approx(values[0].value, abs=0.03)


def test_bound_is_saved_with_all_it_says(tmp_path: Any) -> None:
    initial = seeded(make_mlp)
    bound = certify_error(train(initial, (X, Y)), (X, Y), draws=1, prior=initial, prior_data="none", epochs=1)
    again = Bound.load(bound.save(tmp_path / "bound.json"))
    assert again.to_dict() == bound.to_dict()
    assert again.value == bound.value
    assert again.assumptions == bound.assumptions
    assert "random network" in str(again)


def test_progress_is_told_step_done_and_total() -> None:
    initial = seeded(make_mlp)
    calls: list[tuple[str, int, int | None]] = []
    certify_error(
        train(initial, (X, Y)),
        DataLoader(Examples(), batch_size=50),
        draws=1,
        prior=initial,
        prior_data="none",
        epochs=2,
        progress=lambda *call: calls.append(call),
    )
    steps = list(dict.fromkeys(step for step, _, _ in calls))
    assert steps == [
        "Outputs of the prior",
        "Outputs of the network",
        "Sweeping examples",
        "Trying posteriors",
        "Lowering the bound",
        "Random networks",
    ]
    for step in steps:
        dones = [(done, total) for name, done, total in calls if name == step]
        assert all(0 < done <= (total or inf) for done, total in dones)
        assert dones[-1][0] == dones[-1][1]


def test_error_in_a_progress_function_leaves_the_model_as_it_was() -> None:
    initial = seeded(make_mlp)
    model = train(initial, (X, Y)).train()
    for stop in ("Outputs of the prior", "Sweeping examples", "Lowering the bound", "Random networks"):

        def fail(step: str, done: int, total: int | None, stop: str = stop) -> None:
            if step == stop:
                raise KeyboardInterrupt

        with untouched(model, initial), pytest.raises(KeyboardInterrupt):
            certify_error(model, (X, Y), draws=1, prior=initial, prior_data="none", epochs=1, progress=fail)


def test_the_two_parts_of_a_split_cannot_be_mistaken_for_each_other() -> None:
    data, initial = make_data(400), seeded(lambda: make_mlp(32))
    noisy = data[0], torch.where(torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.5, data[1], 0)
    half = slice(0, 200)
    prior = train(initial, (noisy[0][half], noisy[1][half]), 400)
    bound = certify_error(prior, noisy, prior=prior, prior_data=range(200), draws=1)
    assert bound.assumptions[1].met is None, "what a prior has seen is the caller's word"
    with pytest.raises(DataError, match="Try swapping the two parts"):
        certify_error(prior, noisy, prior=prior, prior_data=range(200, 400), draws=1)
    with pytest.raises(DataError, match="Try swapping the two parts"):
        certify_error(
            prior, (noisy[0][half], noisy[1][half]), prior=prior, prior_data=(noisy[0][200:], noisy[1][200:]), draws=1
        )


def test_copies_of_examples_are_told() -> None:
    x, y = make_data(100)
    doubled = torch.cat([x, x]), torch.cat([y, y])
    model = train(seeded(lambda: make_mlp(8)), (x, y))
    bound = certify_error(model, doubled, draws=1)
    assert any("100 of 200 inputs repeat another" in note for note in bound.notes)
    seen = certify_error(model, doubled, prior=model, prior_data=range(100), draws=1)
    assert "100 of the bound's 100 inputs equal one of them" in seen.assumptions[1].evidence
    assert seen.assumptions[1].met is False
    assert not seen.is_valid
    assert bound.assumptions[0].met is False
    assert not bound.is_valid
    assert not any("repeat another" in note for note in certify_error(model, (x, y), draws=1).notes)


def test_a_bound_found_at_the_prior_is_said_to_be_for_the_prior() -> None:
    data, initial = make_data(200), seeded(lambda: make_mlp(8))
    prior = train(initial, (data[0][:100], data[1][:100]))
    model = train(initial, data, 600)
    bound = certify_error(model, data, prior=prior, prior_data=range(100), draws=2, epochs=1, move=True, lr=1e-9)
    own = certify_error(prior, data, prior=prior, prior_data=range(100), draws=2)
    assert any("found at the prior's own weights" in note for note in bound.notes)
    assert bound.terms["risk at the center"] == own.terms["risk of the network itself"] == bound.details["prior_risk"]
    assert bound.value == pytest.approx(own.value, abs=0.02)


def test_a_large_delta_is_told() -> None:
    model, data = seeded(lambda: make_mlp(8)), make_data(50)
    assert any("Try delta=0.05" in note for note in certify_error(model, data, delta=0.95, draws=1).notes)
    assert not any("delta=" in note for note in certify_error(model, data, delta=0.05, draws=1).notes)


class Borrower(nn.Module):
    """A network whose weights are partly elsewhere: in a closure, or in a list."""

    def __init__(self, hidden: Tensor, kept: bool) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.kept = [{"weights": hidden}] if kept else []
        self.get: Callable[[], Tensor] = lambda: hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.kept[0]["weights"] if self.kept else self.get()
        found: Tensor = self.last(F.relu(F.linear(x, hidden)))
        return found


@pytest.mark.parametrize(("kept", "name"), [(True, "kept"), (False, "a tensor from outside of the modules")])
def test_weights_that_are_not_drawn_are_named_wherever_they_are(kept: bool, name: str) -> None:
    hidden = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    model, data = seeded(lambda: Borrower(hidden, kept)), make_data()
    found = certify_error(model, data, draws=1).assumptions[3]
    assert (found.met, found.evidence) == (None, f"Not drawn: {name}.")
    drawn = compute_bounds(model, data, bounds="isotropic")["isotropic"].assumptions[-1]
    assert drawn.met is None
    assert name in drawn.evidence
    assert certify_error(seeded(make_mlp), data, draws=1).assumptions[3].met is True


@pytest.mark.parametrize(
    "change", [lambda x: x + 1e-6, lambda x: ((x - 0.13) / 0.31).float().double(), lambda x: 2 * x]
)
def test_copies_that_are_equal_up_to_rounding_or_scale_are_found(change: Callable[[Tensor], Tensor]) -> None:
    dice = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 1, 8, 8, generator=dice, dtype=F64), torch.randint(3, (60,), generator=dice)
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    with pytest.raises(DataError, match="got 60 of 60 examples whose inputs are also in prior_data, up to rounding"):
        certify_error(model, (change(x), y), prior=model, prior_data=(x, y))
    others = torch.rand(60, 1, 8, 8, generator=dice, dtype=F64), y
    assert certify_error(model, (x, y), prior=model, prior_data=others, draws=1).assumptions[1].met is None


def test_the_headline_says_that_the_center_was_left() -> None:
    data, initial = make_data(200), seeded(lambda: make_mlp(8))
    prior = train(initial, (data[0][:100], data[1][:100]))
    model = train(initial, data, 600)
    options = {"prior": prior, "prior_data": range(100), "draws": 1}
    assert certify_error(model, data, **options).quantity.endswith("for every prediction")
    found = certify_error(model, data, **options, epochs=1, move=True, lr=1e-9)
    assert found.quantity.endswith("around the prior's own weights and not those given,")
    found = certify_error(model, data, prior=initial, prior_data="none", draws=1, epochs=50, move=True, lr=2e-2)
    assert "% away from those given," in found.quantity
