"""Every term of the bounds of Tsuzuku et al. against its definition."""

from itertools import product
from math import acosh, ceil, cosh, log, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bound_oracle import (
    CAP,
    DELTA,
    compute_diagonal,
    compute_one,
    compute_risk,
    flatten,
    make_data,
    make_net,
    sample_risks,
)
from scipy.optimize import brentq, minimize
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from saltflat.balance import balance_bipartite
from saltflat.bounds import Bound, bound_monte_carlo, compute_bounds
from saltflat.bounds.distributions import ScaledGaussian
from saltflat.engine.context import Context
from saltflat.engine.noise import draw_signs
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.symmetry.rescale import rescale

NORMAL = ("parameterwise", "row_column", "row_column_estimated", "isotropic")
ALL = ("multiplicative", *NORMAL)
LAMBDAS = [2.0**k for k in range(41)]
PART = 0.1  # of delta, for Monte Carlo


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-10, abs=1e-13)


def measure(of: str = "error") -> tuple[nn.Sequential, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A network, its data, its curvature and its squared weights."""
    net, data = make_net(), make_data()
    H = flatten(compute_diagonal(net, data)) / (CAP if of == "clipped_cross_entropy" else 1)
    return net, data, H, flatten(dict(net.named_parameters())).square()


def check_common_terms(found: Bound, net: nn.Module, data: Any, of: str, constant: float, cells: int = 1) -> None:
    """Check what all bounds share: how the terms add up, and how delta is split."""
    t, m, d = found.terms, len(data[0]), found.details
    assert t["risk of the network"] == near(compute_risk(net, data, of))
    assert (t["delta of the bound"], t["delta of Monte Carlo"]) == (near(0.9 * DELTA), near(PART * DELTA))
    estimate = bound_monte_carlo(d["monte_carlo_mean"], d["monte_carlo_samples"], PART * DELTA / cells)
    assert t["risk of random networks"] == near(estimate.upper)
    assert t["risk of the network"] + t["curvature"] + t["remainder"] == near(t["risk of random networks"])
    assert t["strength"] == near(t["lambda"] / (constant * m))
    assert t["weights"] == near(d["kl"] / t["lambda"])
    names = ("risk of random networks", "weights", "scales", "confidence", "strength")
    assert found.value == near(sum(t[name] for name in names))
    assert d["largest_term"] == max(names, key=lambda name: t[name])
    assert found.chance == near(2 / 3 if of == "error" else log(3) / CAP)
    assert found.is_vacuous
    assert found.is_valid
    guesses = d["monte_carlo_mean"] >= 0.95 * found.chance
    assert ("hardly better than guessing" in " ".join(found.notes)) == guesses
    assert found.notes[0].startswith(f"The largest term is {d['largest_term']}")


def compute_normal_terms(found: Bound, posterior: Any, H: Tensor, squares: Tensor) -> tuple[float, float]:
    """Curvature and KL divergence of a normal posterior against the prior of its own covariance around 0."""
    deviation = flatten(posterior.deviation)
    mean = flatten(posterior.mean)
    assert bool((mean.square() == squares).all())
    kl = kl_divergence(Normal(mean, deviation), Normal(torch.zeros_like(mean), deviation)).sum()
    return float((H * deviation.square()).sum() / 2), float(kl)


def find_best_lambda(rise: float, cost: float, constant: float, m: int) -> float:
    """By trying all: rise / sqrt(lambda) + (cost + ln(1/delta)) / lambda + lambda / (c m)."""
    whole = cost + log(1 / (0.9 * DELTA))
    return min(LAMBDAS, key=lambda s: rise / sqrt(s) + whole / s + s / (constant * m))


@pytest.mark.parametrize("of", ["error", "clipped_cross_entropy"])
@pytest.mark.parametrize("constant", [2.0, 8.0])
def test_scales_of_parameters_are_the_best_of_the_grid(of: str, constant: float) -> None:
    net, data, H, squares = measure(of)
    found, [posterior] = compute_one(net, data, "parameterwise", of=of, constant=constant)
    check_common_terms(found, net, data, of, constant)
    n, step = len(H), acosh(1.1)
    side = ceil(0.5 * log(n * 100) / step)
    grid = torch.arange(-side, side + 1, dtype=torch.float64) * step
    each = H[:, None] * (2 * grid).exp() + squares[:, None] * (-2 * grid).exp()
    best = each.min(1)
    rise = float(best.values.sum()) / 2
    scales = n * log(len(grid))
    assert found.terms["lambda"] == find_best_lambda(rise, scales + log(41), constant, len(data[0]))
    root = sqrt(found.terms["lambda"])
    torch.testing.assert_close(flatten(posterior.deviation), grid[best.indices].exp() / sqrt(root), rtol=1e-12, atol=0)
    curvature, kl = compute_normal_terms(found, posterior, H, squares)
    assert found.terms["curvature"] == near(curvature)
    assert found.details["kl"] == near(kl)
    assert found.terms["scales"] == near(scales / root**2)
    assert found.terms["confidence"] == near((log(1 / (0.9 * DELTA)) + log(41)) / root**2)
    ns1 = float((H * squares).sqrt().sum())
    assert found.terms["NS1 term"] == near(ns1 / root)
    assert found.terms["NS1 term"] + found.terms["rounding"] == near(curvature + kl / root**2)
    assert found.details["grid"] == len(grid)


@pytest.mark.parametrize("of", ["error", "clipped_cross_entropy"])
def test_factors_minimize_the_regularized_sum(of: str) -> None:
    net, data, H, squares = measure(of)
    found, [posterior] = compute_one(net, data, "multiplicative", of=of)
    check_common_terms(found, net, data, of, 2.0)
    m, n = len(data[0]), len(H)
    spreads, centers = [4.0**k for k in range(-3, 4)], [-2.0, -1.0, 0.0, 1.0, 2.0]
    fisher_rao = float((H * squares).sum())
    scales, unions = n * log(5), 2 * log(41) + log(7)

    def search(h: float, q: float, spread: float) -> tuple[float, float, float]:
        """The smallest value over s and b, s and b."""
        tried = []
        for b in centers:

            def slope(s: float, b: float = b) -> float:
                return float(2 * h * np.exp(2 * s) - 2 * q * np.exp(-2 * s) + 2 * (s - b) / spread)

            s = brentq(slope, -50, 50, xtol=1e-15, rtol=1e-15)
            tried.append((h * np.exp(2 * s) + q * np.exp(-2 * s) + (s - b) ** 2 / spread, s, b))
        return min(tried)

    solved = {
        spread: [search(h, q, spread) for h, q in zip(H.tolist(), squares.tolist(), strict=True)] for spread in spreads
    }
    xi = log(1 / (0.9 * DELTA)) + scales + unions
    value, spread, strength = min(
        (
            spread / (2 * sqrt(s)) * fisher_rao
            + sum(each[0] for each in solved[spread]) / (2 * sqrt(s))
            + xi / s
            + s / (2 * m),
            spread,
            s,
        )
        for spread, s in product(spreads, LAMBDAS)
    )
    t, root = found.terms, sqrt(strength)
    assert (t["lambda"], found.details["spread"]) == (strength, spread)
    assert t["Fisher-Rao term"] == near(spread / (2 * root) * fisher_rao)
    assert t["NS0 term"] == near(sum(each[0] for each in solved[spread]) / (2 * root))
    assert t["scales"] + t["confidence"] == near(xi / strength)
    # Equation (15), with the remainder of (28).
    assert found.value == near(value + t["risk of the network"] + t["remainder"])
    # Equations (13) and (14), and the KL divergence of the distributions of mu and sigma.
    assert isinstance(posterior, ScaledGaussian)
    assert posterior.spread == near(sqrt(spread / root))
    logs = torch.tensor([each[1] for each in solved[spread]], dtype=torch.float64)
    beta = torch.tensor([each[2] for each in solved[spread]], dtype=torch.float64)
    mu = flatten(posterior.mean) / flatten(posterior.deviation)
    torch.testing.assert_close(flatten(posterior.deviation), logs.exp() / sqrt(root), rtol=1e-10, atol=0)
    one, wide = torch.ones_like(mu), torch.full_like(mu, posterior.spread)
    kl = kl_divergence(Normal(mu, one), Normal(0 * mu, one)) + kl_divergence(Normal(logs, wide), Normal(beta, wide))
    assert found.details["kl"] == pytest.approx(float(kl.sum()), rel=1e-10)
    assert t["curvature"] + t["weights"] == near(t["Fisher-Rao term"] + t["NS0 term"])
    bent = (H * (2 * logs).exp() + spread * H * squares).sum() / (2 * root)
    assert t["curvature"] == near(float(bent))


def split(values: Tensor, net: nn.Module) -> list[Tensor]:
    """A flat vector as one matrix per layer, with the bias as the last column."""
    sizes = [value.numel() for value in net.parameters()]
    parts = [part.reshape(p.shape) for part, p in zip(values.split(sizes), net.parameters(), strict=True)]
    return [torch.cat([w, b[:, None]], 1) for w, b in zip(parts[::2], parts[1::2], strict=True)]


def search_box(f: Tensor, u: Tensor, radius: float) -> float:
    """The minimum of sum F e^(x + y) + U e^(-x - y) over a box by L-BFGS-B."""
    A, B = f.numpy(), u.numpy()
    rows = len(A)

    def total(z: Any) -> Any:
        s = z[:rows, None] + z[None, rows:]
        up, down = A * np.exp(s), B * np.exp(-s)
        return (up + down).sum(), np.concatenate([(up - down).sum(1), (up - down).sum(0)])

    start = np.zeros(sum(A.shape))
    return float(
        minimize(
            total,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-radius, radius)] * len(start),
            options={"ftol": 1e-16, "gtol": 1e-13, "maxiter": 100_000, "maxfun": 100_000, "maxcor": 50},
        ).fun
    )


def find_factors(logs: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Integers of rows and columns, up to one that can move between them, whose sums are the logarithms."""
    whole = logs / step
    assert bool(((whole - whole.round()).abs() < 1e-9).all())
    whole = whole.round()
    rows, columns = whole[:, 0] - whole[0, 0], whole[0]
    assert bool((rows[:, None] + columns[None, :] == whole).all())
    return rows, columns


@pytest.mark.parametrize("of", ["error", "clipped_cross_entropy"])
def test_rows_and_columns_have_the_best_scales_in_the_box(of: str) -> None:
    net, data, H, squares = measure(of)
    found, [posterior] = compute_one(net, data, "row_column", of=of)
    check_common_terms(found, net, data, of, 2.0)
    n, step, t = len(H), acosh(1.21) / 2, found.terms
    side = ceil(0.5 * log(n * 100) / step)
    ns2 = sum(search_box(f, u, 2 * side * step) for f, u in zip(split(H, net), split(squares, net), strict=True))
    assert found.details["ns2"] == near(ns2)
    root = sqrt(t["lambda"])
    assert t["NS2 term"] == near(ns2 / (2 * root))
    curvature, kl = compute_normal_terms(found, posterior, H, squares)
    assert t["curvature"] == near(curvature)
    assert found.details["kl"] == near(kl)
    assert t["NS2 term"] + t["rounding"] == near(curvature + kl / root**2)
    assert ns2 / (2 * root) <= curvature + kl / root**2 <= 1.21 * ns2 / (2 * root)
    # (3 rows, 2 columns and one for the bias) twice, with one column more in the second layer
    assert (found.details["scales"], found.details["scales_of_weights"]) == (6 + 7, 5 + 6)
    assert t["scales"] == near(13 * log(2 * side + 1) / root**2)
    assert t["lambda"] == find_best_lambda((curvature + kl / root**2) * root, 13 * log(2 * side + 1) + log(41), 2, 40)
    for each in split((flatten(posterior.deviation) * sqrt(root)).log(), net):
        find_factors(each, step)


def test_the_estimated_curvature_is_clamped_and_its_scales_have_no_border() -> None:
    net, data, _, squares = measure()
    found, [posterior] = compute_one(net, data, "row_column_estimated", curvature_draws=4)
    check_common_terms(found, net, data, "error", 2.0)
    with open_session(net, "eval", data):
        context = Context(Problem.build(net, data), parse_column_plan("exact"), 0, 1 << 28)
        signs = [draw_signs(context, draw) for draw in range(4)]
    estimates, r = [], 1e-2
    for s in signs:
        sides = []
        for sign in (1, -1):
            moved = {
                name: (p + sign * r * p.abs() * s[name]).detach().requires_grad_() for name, p in net.named_parameters()
            }
            loss = F.cross_entropy(torch.func.functional_call(net, moved, (data[0],)), data[1])
            sides.append(torch.autograd.grad(loss, list(moved.values())))
        estimates.append(
            torch.cat(
                [
                    (s[name] * (up - down) / (2 * r * p.abs())).reshape(-1)
                    for (name, p), up, down in zip(net.named_parameters(), *sides, strict=True)
                ]
            ).detach()
        )
    raw = torch.stack(estimates).mean(0)
    H = raw.clamp_min(0)
    t, root = found.terms, sqrt(found.terms["lambda"])
    assert found.details["negative_curvatures"] == int((raw < 0).sum()) > 0
    ns_col = 0.0
    for f, u in zip(split(H, net), split(squares, net), strict=True):

        def total(g: Any, f: Tensor = f, u: Tensor = u) -> float:
            a, b = f.numpy().T @ np.exp(g), u.numpy().T @ np.exp(-g)
            return float(np.sqrt(a * b).sum())

        ns_col += float(minimize(total, np.zeros(len(f)), method="BFGS", options={"gtol": 1e-9}).fun)
    assert found.details["ns_col"] == pytest.approx(ns_col, rel=1e-8)
    assert t["NS_col term"] == near(found.details["ns_col"] / root)
    curvature, kl = compute_normal_terms(found, posterior, H, squares)
    assert t["curvature"] == pytest.approx(curvature, rel=1e-9)
    assert found.details["kl"] == near(kl)
    assert t["NS_col term"] + t["rounding"] == near(t["curvature"] + t["weights"])
    # What the KL divergence alone takes of the paper's coefficient 1 is half of it, up to rounding.
    assert found.details["needed_coefficient"] == near(kl / root**2 / t["NS_col term"])
    assert 0.5 / 1.21 <= found.details["needed_coefficient"] <= 0.5 * 1.21
    # The integers' prior probabilities sum to 1, and the scales are such integers.
    step = acosh(1.21) / 2
    least = 0.0
    for each in split((flatten(posterior.deviation) * sqrt(root)).log(), net):
        rows, columns = find_factors(each, step)
        least += min(
            float((2 * torch.cat([rows + shift, columns - shift]).abs().log1p() + log(pi**2 / 3 - 1)).sum())
            for shift in range(-100, 101)
        )
    assert found.details["scale_cost"] == near(least)


def test_one_variance_for_all_is_tried_at_every_size() -> None:
    net, data, H, squares = measure()
    found, posteriors = compute_one(net, data, "isotropic")
    check_common_terms(found, net, data, "error", 2.0, cells=15)
    sizes = [2.0**k for k in range(-8, 7)]
    assert [float(next(iter(p.deviation.values())).max()) for p in posteriors] == sizes
    rows, trace, norm, m = found.details["by_deviation"], float(H.sum()), float(squares.sum()), len(data[0])
    for row, s in zip(rows, sizes, strict=True):
        cost = norm / (2 * s**2) + log(41) + log(15)
        best = find_best_lambda(0.0, cost, 2.0, m)
        upper = bound_monte_carlo(row["rise"] + found.terms["risk of the network"], m, PART * DELTA / 15).upper
        assert row["expected"] == near(s**2 / 2 * trace)
        assert row["bound"] == near(upper + (cost + log(1 / (0.9 * DELTA))) / best + best / (2 * m))
    assert found.value == near(min(row["bound"] for row in rows))
    assert found.details["kl"] == near(norm / (2 * found.details["deviation"] ** 2))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("of", ["error", "clipped_cross_entropy"])
def test_the_risk_of_random_networks_is_that_of_the_stated_posterior(name: str, of: str) -> None:
    net, data = make_net(), make_data()
    found, posteriors = compute_one(net, data, name, of=of, draws=100)
    number = 0
    if name == "isotropic":
        number = [row["deviation"] for row in found.details["by_deviation"]].index(found.details["deviation"])
    risks = sample_risks(net, posteriors[number], data, of, 4000)
    expected, error = float(risks.mean()), float(risks.std()) / 4000**0.5
    # Draws for every example scatter by at most 1/2 each.
    error = sqrt(error**2 + 0.25 / (100 * len(data[0])))
    assert found.details["monte_carlo_samples"] == 100 * len(data[0])
    assert abs(found.details["monte_carlo_mean"] - expected) < 4 * error


def test_rounding_a_scale_costs_at_most_cosh_of_the_step() -> None:
    step = acosh(1.1)
    offsets = torch.linspace(-step / 2, step / 2, 1001, dtype=torch.float64)
    factors = ((2 * offsets).exp() + (-2 * offsets).exp()) / 2
    assert float(factors.max()) == pytest.approx(cosh(step), rel=1e-14)
    net, data, *_ = measure()
    found, _ = compute_one(net, data, "parameterwise")
    assert 1 <= found.details["rounding_factor"] <= found.details["rounding_limit"] == pytest.approx(1.1)


@pytest.mark.parametrize("seed", range(5))
def test_rounding_rows_and_columns_costs_at_most_cosh_of_two_steps(seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    f, u = (torch.rand(3, 4, generator=dice, dtype=torch.float64) ** 3 for _ in range(2))
    found = balance_bipartite(f, u)
    assert found.column_potentials is not None
    both = found.potentials[:, None] + found.column_potentials[None, :]
    up, down = f * both.exp(), u * (-both).exp()
    step = acosh(1.21) / 2
    # The sum is convex in the shifts, so the worst are corners.
    worst = 0.0
    for corner in product((-step / 2, step / 2), repeat=7):
        g = torch.tensor(corner, dtype=torch.float64)
        moved = 2 * (g[:3, None] + g[None, 3:])
        worst = max(worst, float((up * moved.exp() + down * (-moved).exp()).sum()))
    assert 1.1 < worst / found.value <= cosh(2 * step) * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rescaling_changes_terms_by_rounding_only_and_isotropic_ones_freely(seed: int) -> None:
    net, data = make_net(widths=(2, 4, 3)), make_data()
    other = rescale(net, data[0], seed=seed, spread=2.0)
    before, after = (compute_bounds(each, data, bounds=[*ALL]) for each in (net, other))
    one, two = before["multiplicative"], after["multiplicative"]
    assert two.details["fisher_rao"] == pytest.approx(one.details["fisher_rao"], rel=1e-9)
    one, two = before["parameterwise"], after["parameterwise"]
    assert two.details["ns1"] == pytest.approx(one.details["ns1"], rel=1e-9)
    for name, limit in (("parameterwise", 1.1), ("row_column", 1.21), ("row_column_estimated", 1.21)):
        one, two = before[name], after[name]
        assert one.terms["lambda"] == two.terms["lambda"]
        totals = [each.terms["curvature"] + each.terms["weights"] for each in (one, two)]
        assert max(totals) <= min(totals) * limit
        assert two.terms["risk of the network"] == one.terms["risk of the network"]
    assert after["row_column"].details["ns2"] == pytest.approx(before["row_column"].details["ns2"], rel=1e-6)
    estimated = [each["row_column_estimated"].details["ns_col"] for each in (before, after)]
    assert estimated[0] == pytest.approx(estimated[1], rel=1e-6)
    traces = [each["isotropic"].details["trace"] for each in (before, after)]
    assert max(traces) > 1.01 * min(traces)
    assert "depends on the scale of the weights" in " ".join(before["isotropic"].notes)


def test_biases_of_convolutions_are_columns_and_vectors_have_scales_of_their_own() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3, bias=False)
        ).double()
        data = torch.randn(12, 2, 3, 3).double(), torch.randint(3, (12,))
    found, [posterior] = compute_one(net, data, "row_column")
    # Two groups of 2 rows, 1 column and a bias; 4 weights and 4 biases of the norm; 3 rows and 16 columns.
    assert found.details["scales"] == 2 * (2 + 1 + 1) + 8 + (3 + 16)
    assert found.details["scales_of_weights"] == 2 * (2 + 1) + (3 + 16)
    step, root = found.details["step"], found.terms["lambda"] ** 0.25
    logs = {name: (each * root).log() / step for name, each in posterior.deviation.items()}
    kernel = logs["0.weight"]
    assert bool((kernel - kernel[:, :, :1, :1]).abs().max() < 1e-9)  # positions share a scale
    for group in (slice(0, 2), slice(2, 4)):
        gap = logs["0.bias"][group] - kernel[group, 0, 0, 0]
        assert abs(float(gap[0] - gap[1])) < 1e-9  # rows are shared with the bias
    H, squares = compute_diagonal(net, data), {name: p.detach().square() for name, p in net.named_parameters()}
    variance = {name: each.square() for name, each in posterior.deviation.items()}
    curvature = sum(float((H[name] * each).sum()) for name, each in variance.items()) / 2
    kl = sum(float((squares[name] / each).sum()) for name, each in variance.items()) / 2
    assert found.terms["curvature"] == near(curvature)
    assert found.details["kl"] == near(kl)


def test_random_labels_leave_every_bound_above_guessing_and_bounds_hold_on_new_data() -> None:
    dice = torch.Generator().manual_seed(5)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 2, generator=dice, dtype=torch.float64)
        return x, (x.sum(1) + 0.3 * torch.randn(count, generator=dice, dtype=torch.float64) > 0).long()

    data, new = draw(300), draw(2000)
    shuffled = data[0], torch.randint(2, (300,), generator=dice)
    for examples, fresh in ((data, new), (shuffled, None)):
        net = nn.Linear(2, 2).double()
        net.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(200):
            optimizer.zero_grad()
            F.cross_entropy(net(examples[0]), examples[1]).backward()
            optimizer.step()
        for name in ALL:
            found, posteriors = compute_one(net, examples, name)
            if fresh is None:
                assert found.value >= 0.9 * found.chance
            else:
                assert found.value >= max(
                    float(sample_risks(net, p, fresh, "error", 200).mean()) for p in posteriors[-1:]
                )
