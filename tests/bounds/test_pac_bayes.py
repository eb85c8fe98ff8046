"""PAC-Bayes inequalities, against arithmetic with 60 digits, direct sums, and simulations whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import e, exp, inf, isclose, log, nan, sqrt
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch.distributions import Normal, kl_divergence

from saltflat.bounds import (
    bound_catoni,
    bound_linear,
    bound_maurer,
    bound_mcallester,
    bound_monte_carlo,
    choose_strength,
    compute_binary_kl,
    compute_gaussian_kl,
    invert_binary_kl,
    make_grid,
)
from saltflat.errors import OptionError, UnknownNameError

QS = [0.0, 1e-300, 1e-12, 1e-6, 0.001, 0.02, 0.1, 1 / 3, 0.5, 0.7, 0.9, 0.999, 1 - 1e-9, 1 - 2**-53, 1.0]
BUDGETS = [1e-15, 3e-14, 1e-12, 1e-9, 2e-7, 1e-5, 1e-3, 0.02, 0.1, 0.5, 1.0, 2.0, 7.0, 20.0, 50.0]


def precise_kl(q: float, p: mpmath.mpf) -> mpmath.mpf:
    """By its definition, for exact numbers q and p."""
    pairs = [(mpmath.mpf(q), p), (1 - mpmath.mpf(q), 1 - p)]
    return mpmath.fsum(mpmath.inf if b == 0 else a * mpmath.log(a / b) for a, b in pairs if a != 0)


def precise_inverse(q: float, budget: float) -> mpmath.mpf:
    """By bisection; from below, and true to about 1e-30."""
    low, high = mpmath.mpf(q), mpmath.mpf(1)
    for _ in range(110):
        middle = (low + high) / 2
        low, high = (middle, high) if precise_kl(q, middle) <= budget else (low, middle)
    return low


@pytest.mark.parametrize("q", QS)
def test_the_inverse_is_rounded_up_from_that_with_60_digits(q: float) -> None:
    with mpmath.workdps(60):
        for budget in BUDGETS:
            exact, found = precise_inverse(q, budget), invert_binary_kl(q, budget)
            assert q <= found <= 1
            assert exact <= found <= exact * (1 + mpmath.mpf("1e-12"))


def test_the_inverse_grows_with_budget_and_share() -> None:
    budgets = np.geomspace(1e-15, 50, 200).tolist()
    for q in QS:
        values = [invert_binary_kl(q, budget) for budget in budgets]
        assert all(a <= b for a, b in pairwise(values))
    for budget in BUDGETS:
        values = [invert_binary_kl(q, budget) for q in sorted([*QS, *np.linspace(0, 1, 101).tolist()])]
        assert all(a <= b for a, b in pairwise(values))
    assert invert_binary_kl(0.3, inf) == 1.0
    assert invert_binary_kl(0.3, 0.0) == 0.3


def test_the_binary_divergence_is_that_with_60_digits() -> None:
    with mpmath.workdps(60):
        for q in QS:
            for p in QS[1:-1]:
                exact = precise_kl(q, mpmath.mpf(p))
                # What two shares have in common cancels.
                assert abs(compute_binary_kl(q, p) - exact) <= 1e-13 * exact + 1e-15
    assert compute_binary_kl(0.5, 0.0) == compute_binary_kl(0.5, 1.0) == inf
    assert compute_binary_kl(0.0, 0.0) == compute_binary_kl(1.0, 1.0) == 0.0
    assert min(compute_binary_kl(q, q * (1 + 1e-15)) for q in np.linspace(0.01, 0.99, 99).tolist()) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gaussian_divergence_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    shapes = {"a": (3, 4), "b": (5,), "c": ()}
    mean, center = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(2)]
    variance, prior = [{name: (3 * draw(*shape)).exp() for name, shape in shapes.items()} for _ in range(2)]
    expected = sum(
        float(
            kl_divergence(
                Normal(mean[name].double(), variance[name].double().sqrt()),
                Normal(center[name].double(), prior[name].double().sqrt()),
            ).sum()
        )
        for name in shapes
    )
    assert compute_gaussian_kl(mean, variance, center, prior) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ratio", [1e-30, 1e-17, 1e-8, 0.5, 1 - 1e-6, 1.0, 1 + 1e-4, 3.0, 1e20])
def test_the_gaussian_divergence_resolves_any_ratio_of_variances(ratio: float) -> None:
    zero, one = {"w": torch.zeros(1)}, {"w": torch.ones(1, dtype=torch.float64)}
    found = compute_gaussian_kl(zero, {"w": ratio * one["w"]}, zero, one)
    with mpmath.workdps(60):
        exact = (mpmath.mpf(ratio) - 1 - mpmath.log(mpmath.mpf(ratio))) / 2
        assert abs(found - exact) <= 1e-9 * exact


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, *range(20, 201, 20)])
def test_the_constant_of_maurer(m: int) -> None:
    """The expectation of exp(m kl(mean, p)) is at most 2 sqrt(m), whatever p is."""
    with mpmath.workdps(40):
        for p in ("0.5", "0.01"):
            share = mpmath.mpf(p)
            found = mpmath.fsum(
                mpmath.binomial(m, k)
                * share**k
                * (1 - share) ** (m - k)
                * mpmath.exp(m * precise_kl_of_shares(mpmath.mpf(k) / m, share))
                for k in range(m + 1)
            )
            assert sqrt(m) <= found <= 2 * mpmath.sqrt(m) * (1 + mpmath.mpf("1e-30"))


def precise_kl_of_shares(a: mpmath.mpf, b: mpmath.mpf) -> mpmath.mpf:
    return mpmath.fsum(x * mpmath.log(x / y) for x, y in [(a, b), (1 - a, 1 - b)] if x != 0)


def test_the_constant_of_maurer_for_all_sizes() -> None:
    for m in range(1, 201):
        k = np.arange(m + 1)
        logs = [0.0 if i in (0, m) else i * log(i / m) + (m - i) * log(1 - i / m) for i in k.tolist()]
        choices = [float(mpmath.log(mpmath.binomial(m, i))) for i in k.tolist()]
        assert np.exp(np.array(logs) + choices).sum() <= 2 * sqrt(m) * (1 + 1e-12)


Bounds = dict[str, Callable[[float, float], float]]
DELTA, SETS, EXAMPLES = 0.05, 1000, 120
STRENGTHS = make_grid(8.0, 512.0, 2.0)


def make_bounds() -> Bounds:
    """Every valid inequality as a function of the empirical risk and the divergence, at the same delta."""
    return {
        "linear, c = 2": partial(bound_linear, examples=EXAMPLES, delta=DELTA, strength=60.0),
        "linear, c = 8": partial(bound_linear, examples=EXAMPLES, delta=DELTA, strength=60.0, constant=8.0),
        "Catoni": partial(bound_catoni, examples=EXAMPLES, delta=DELTA, strength=60.0),
        "McAllester": partial(bound_mcallester, examples=EXAMPLES, delta=DELTA),
        "Maurer": partial(bound_maurer, examples=EXAMPLES, delta=DELTA),
        "best linear": lambda risk, kl: choose_strength(
            bound_linear, risk, kl, EXAMPLES, DELTA, STRENGTHS, constant=8.0
        )[0],
        "best Catoni": lambda risk, kl: choose_strength(bound_catoni, risk, kl, EXAMPLES, DELTA, STRENGTHS)[0],
    }


def draw_threshold_risks() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the empirical risks (sets, classifiers) of thresholds on a line, and their true risks.

    The label of x, uniform on [0, 1], is whether x > 0.3, and is flipped with probability 0.1.
    """
    dice = np.random.default_rng(0)
    thresholds = np.linspace(0, 1, 41)
    x = dice.random((SETS, EXAMPLES))
    labels = (x > 0.3) ^ (dice.random(x.shape) < 0.1)
    empirical = np.stack([((x > t) != labels).mean(1) for t in thresholds], 1)
    return empirical, 0.1 + 0.8 * np.abs(thresholds - 0.3)


def draw_coin_risks() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the risks of 500 classifiers that guess: the best on the examples is no better than the others."""
    dice = np.random.default_rng(1)
    return dice.binomial(EXAMPLES, 0.5, (SETS, 500)) / EXAMPLES, np.full(500, 0.5)


def make_posteriors(empirical: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Return distributions (sets, classifiers) that follow the examples more and more closely, up to the minimizer."""
    found = {}
    for strength in (0.0, 30.0, 300.0):
        weights = np.exp(-strength * (empirical - empirical.min(1, keepdims=True)))
        found[f"Gibbs, {strength:g}"] = weights / weights.sum(1, keepdims=True)
    found["minimizer"] = np.eye(empirical.shape[1])[empirical.argmin(1)]
    return found


def compute_uniform_kl(posterior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the divergence from the uniform distribution over the classifiers."""
    logs = np.log(np.where(posterior > 0, posterior, 1.0))
    found: NDArray[np.float64] = np.maximum(0.0, (posterior * logs).sum(1) + log(posterior.shape[1]))
    return found


@pytest.mark.parametrize("draw", [draw_threshold_risks, draw_coin_risks], ids=["thresholds", "coins"])
def test_bounds_hold_for_all_posteriors_at_once(
    draw: Callable[[], tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> None:
    empirical, true = draw()
    bounds = make_bounds()
    violated = {name: np.zeros(SETS, dtype=bool) for name in [*bounds, "no bound", "no divergence"]}
    for posterior in make_posteriors(empirical).values():
        risks, truths = (posterior * empirical).sum(1), posterior @ true
        divergences = compute_uniform_kl(posterior)
        for name, bound in bounds.items():
            values = [bound(min(1.0, risk), kl) for risk, kl in zip(risks.tolist(), divergences.tolist(), strict=True)]
            violated[name] |= truths > np.array(values)
        violated["no bound"] |= truths > risks
        violated["no divergence"] |= truths > [bounds["Maurer"](min(1.0, risk), 0.0) for risk in risks.tolist()]
    rates = {name: float(each.mean()) for name, each in violated.items()}
    print({name: f"{rate:.1%}" for name, rate in rates.items()})
    assert max(rates[name] for name in bounds) <= DELTA
    # The posteriors do overfit: without its parts, the inequality would be caught.
    assert rates["no bound"] > 0.5
    assert draw is draw_threshold_risks or rates["no divergence"] > DELTA


def test_for_one_fixed_classifier_the_bounds_fail_rarely_but_not_never() -> None:
    """Where nothing was chosen, the simulation is sharp enough to see a bound that is a little too small."""
    counts = np.random.default_rng(2).binomial(EXAMPLES, 0.2, 100_000)
    rates = {}
    for name, bound in make_bounds().items():
        values = np.array([bound(count / EXAMPLES, 0.0) for count in range(EXAMPLES + 1)])
        rates[name] = float((values[counts] < 0.2).mean())
    print({name: f"{rate:.2%}" for name, rate in rates.items()})
    assert max(rates.values()) <= DELTA
    assert rates["Catoni"] > 0.002
    with_half_the_room = np.array([bound_catoni(k / EXAMPLES, 0.0, EXAMPLES, 0.5, strength=60.0) for k in range(121)])
    assert (with_half_the_room[counts] < 0.2).mean() > DELTA


@pytest.mark.parametrize("method", ["kl", "hoeffding"])
@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_monte_carlo_bounds_cover_samples_of_different_distributions(method: str, delta: float) -> None:
    dice = np.random.default_rng(3)
    shares = dice.beta(0.3, 2.0, 80)
    means = (dice.random((4000, 80)) < shares).mean(1)
    table = {mean: bound_monte_carlo(mean, 80, delta, method).upper for mean in set(means.tolist())}  # type: ignore[arg-type]
    uppers = np.array([table[mean] for mean in means.tolist()])
    rate = float((uppers < shares.mean()).mean())
    print(f"{method}, delta {delta}: {rate:.2%}")
    assert rate <= delta
    assert (means < shares.mean()).mean() > 0.4
    if delta == 0.3:
        assert rate > 0


def test_the_fields_of_a_monte_carlo_estimate() -> None:
    found = bound_monte_carlo(0.2, 50, 0.1)
    assert (found.mean, found.samples, found.delta, found.method) == (0.2, 50, 0.1, "kl")
    assert found.upper == invert_binary_kl(0.2, log(10) / 50)
    assert found.margin == found.upper - 0.2
    assert found.upper <= bound_monte_carlo(0.2, 50, 0.1, "hoeffding").upper
    assert bound_monte_carlo(0.99, 2, 0.01, "hoeffding").upper == 1.0
    assert bound_monte_carlo(0.5, 10**7, 1e-320).upper < 0.51


@pytest.mark.parametrize(("ones", "samples"), [(0, 10), (3, 10), (103, 1000), (999, 1000), (1000, 1000)])
def test_the_exact_bound_of_a_share_is_where_so_few_ones_have_probability_delta(ones: int, samples: int) -> None:
    found = bound_monte_carlo(ones / samples, samples, 0.05, "binomial")
    assert found.method == "binomial"
    if ones == samples:
        assert found.upper == 1.0
    else:
        assert float(binom.cdf(ones, samples, found.upper)) == pytest.approx(0.05, rel=1e-9)
    assert ones / samples <= found.upper <= bound_monte_carlo(ones / samples, samples, 0.05).upper + 1e-12
    with pytest.raises(OptionError, match="samples that are 0 or 1"):
        bound_monte_carlo(0.25, 10, 0.05, "binomial")


RISKS, KLS, SIZES = [0.0, 0.01, 0.2, 0.5, 0.9, 1.0], [0.0, 1.0, 40.0, 3000.0], [1, 10, 1000, 60000]
CASES = [(risk, kl, size, delta) for risk in RISKS for kl in KLS for size in SIZES for delta in (0.3, 0.01, 1e-9)]


@pytest.mark.parametrize(("risk", "kl", "size", "delta"), CASES)
def test_the_order_of_the_bounds(risk: float, kl: float, size: int, delta: float) -> None:
    maurer, mcallester = bound_maurer(risk, kl, size, delta), bound_mcallester(risk, kl, size, delta)
    assert risk <= maurer <= min(1.0, mcallester) * (1 + 1e-12)
    for strength in (0.1 * size, size, 10.0 * size):
        linear = partial(bound_linear, risk, kl, size, delta, strength=strength)
        # Catoni's bound uses the moments of a coin, the linear one Hoeffding's bound on them; 2 is larger still.
        assert bound_catoni(risk, kl, size, delta, strength=strength) <= linear(constant=8.0) * (1 + 1e-12)
        assert linear(constant=8.0) < linear(constant=2.0) == linear()
        assert linear(constant=2.0) - linear(constant=8.0) == pytest.approx(3 * strength / (8 * size), rel=1e-6)


def test_each_bound_by_its_definition() -> None:
    risk, kl, size, delta, strength = 0.13, 17.0, 900, 0.02, 130.0
    budget = (kl + log(2 * sqrt(size) / delta)) / size
    assert bound_mcallester(risk, kl, size, delta) == pytest.approx(risk + sqrt(budget / 2), rel=1e-14)
    assert compute_binary_kl(risk, bound_maurer(risk, kl, size, delta)) == pytest.approx(budget, rel=1e-11)
    catoni = bound_catoni(risk, kl, size, delta, strength=strength)
    beta = strength / size
    # As the exponential inequality has it, before it is solved for the risk.
    assert -log(1 - catoni * (1 - exp(-beta))) == pytest.approx(beta * risk + (kl + log(1 / delta)) / size, rel=1e-13)
    linear = bound_linear(risk, kl, size, delta, strength=strength, constant=3.0)
    assert linear == pytest.approx(risk + strength / (3 * size) + (kl + log(1 / delta)) / strength, rel=1e-14)


def test_a_choice_among_strengths_costs_the_logarithm_of_their_number() -> None:
    grid = [50.0, 100.0, 200.0, 400.0]
    value, strength = choose_strength(bound_linear, 0.1, 5.0, 1000, 0.05, grid, constant=8.0)
    each = {s: bound_linear(0.1, 5.0, 1000, 0.05, strength=s, constant=8.0) + log(4) / s for s in grid}
    assert value == pytest.approx(min(each.values()), rel=1e-13)
    assert strength == min(each, key=lambda s: each[s])
    assert choose_strength(bound_catoni, 0.1, 5.0, 1000, 0.05, [100.0]) == (
        bound_catoni(0.1, 5.0, 1000, 0.05, strength=100.0),
        100.0,
    )


def test_a_grid_holds_the_powers_between_its_ends() -> None:
    assert make_grid(0.5, 4.0, 2.0) == (0.5, 1.0, 2.0, 4.0)
    assert make_grid(3.0, 5.0, 2.0) == (4.0,)
    with pytest.raises(OptionError, match=r"but got 0 powers of 2\.0 from 3\.0 to 3\.5"):
        make_grid(3.0, 3.5, 2.0)
    with pytest.raises(OptionError, match="100,000 numbers"):
        make_grid(1.0, 1e6, 1 + 1e-12)
    fine = make_grid(1e-3, 1e3, 1.01)
    assert all(isclose(b / a, 1.01) for a, b in pairwise(fine))
    assert fine[0] >= 1e-3 > fine[0] / 1.01
    assert fine[-1] <= 1e3 < fine[-1] * 1.01
    assert len(make_grid(2.0**-14, 2.0**4, 2.0**0.25)) == 73


def gaussian_kl(own: float, wide: float) -> float:
    return compute_gaussian_kl(*({"layer.w": torch.tensor([each, 1.0])} for each in (0.0, own, 0.0, wide)))


def call(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[[], object]:
    """The call, whatever the types of its arguments."""
    return partial(function, *args, **kwargs)


ONES = (0.1, 1.0, 10)
WRONG: list[tuple[Callable[[], object], str]] = [
    *((call(compute_binary_kl, q, 0.5), r"a number from 0 to 1, but got q=") for q in (-0.1, 1.1, nan, True, "x")),
    (call(compute_binary_kl, 0.5, 2), r"got p=2\. The loss must lie in \[0, 1\]: try the 0-1 error"),
    (call(invert_binary_kl, 1.5, 1.0), r"got q=1\.5"),
    *((call(invert_binary_kl, 0.5, each), r"a budget of at least 0, but got budget=") for each in (-1e-9, nan)),
    *((call(gaussian_kl, each, 1.0), r"a posterior with variance .* in 'layer\.w'") for each in (0.0, -1.0, inf, nan)),
    *((call(gaussian_kl, 1.0, each), r"a prior with variance .* in 'layer\.w'.*Try a larger") for each in (0.0, nan)),
    *((call(bound, 1.5, 1.0, 10), r"got risk=1\.5") for bound in (bound_maurer, bound_mcallester)),
    *((call(bound, nan, 1.0, 10, strength=1.0), r"got risk=nan") for bound in (bound_linear, bound_catoni)),
    *((call(bound_maurer, 0.1, kl, 10), r"got kl=") for kl in (-1.0, nan, inf, "x")),
    *((call(bound_maurer, 0.1, 1.0, size), r"got examples=") for size in (0, 2.5, -1)),
    *((call(bound_maurer, *ONES, delta), r"between 0 and 1, but got delta=.*0\.05") for delta in (0, 1, nan, "x")),
    *((call(bound_linear, *ONES, strength=s), r"a positive number, but got strength=") for s in (0.0, nan, inf)),
    *((call(bound_catoni, *ONES, strength=s), r"a positive number, but got strength=") for s in (0.0, -1.0)),
    (call(bound_linear, *ONES, strength=1.0, constant=8.1), r"at most 8, .* constant=8\.1\. Try 8, or 2"),
    (call(bound_linear, *ONES, strength=1.0, constant=0.0), r"a positive number, but got constant=0"),
    (call(choose_strength, bound_linear, *ONES, 0.05, []), r"at least one strength, but got an empty grid"),
    (call(choose_strength, bound_linear, *ONES, "x", [1.0]), r"got delta='x'"),
    (call(choose_strength, bound_linear, *ONES, 1.5, [1.0, 2.0]), r"got delta=1\.5"),
    (call(bound_monte_carlo, 1.5, 10), r"got mean=1\.5"),
    (call(bound_monte_carlo, 0.5, 0), r"got samples=0"),
    (call(bound_monte_carlo, 0.5, 10, 0.0), r"got delta=0"),
    *((call(make_grid, *each), r"low <= high and a ratio above 1") for each in ((2.0, 1.0, 2.0), (1.0, 2.0, 1.0))),
    (call(make_grid, 1.0, 2.0, nan), r"ratio=nan\. Try make_grid\(1, 1e6, 2\)"),
    (call(make_grid, 0.0, 2.0, 2.0), r"a positive number, but got low=0"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_wrong_arguments_give_one_clear_error(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(OptionError, match=rf"^Expected .*(?:{says})"):
        wrong()


def test_an_unknown_method_gives_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="hoeffding"):
        bound_monte_carlo(0.5, 10, 0.1, "hoefding")  # type: ignore[arg-type]


def test_the_doctest_numbers_of_maurer_follow_from_its_budget() -> None:
    assert bound_maurer(0.0, 3.0, 100, delta=20 / e**5) == pytest.approx(1 - exp(-8 / 100), rel=1e-13)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prior_mean": {}}, "only one of mean and prior_mean"),
        ({"mean": {}}, "only one of mean and variance"),
        ({"variance": {"w": torch.ones(3)}}, "only one of mean and variance"),
        ({"mean": {"w": torch.tensor([1.0, nan])}}, "NaN or infinity in mean"),
        ({"prior_mean": {"w": torch.ones(2, dtype=torch.complex64)}}, "complex numbers in prior_mean"),
    ],
)
def test_distributions_that_do_not_fit_are_refused(change: dict[str, Any], says: str) -> None:
    given = {name: {"w": torch.ones(2)} for name in ("mean", "variance", "prior_mean", "prior_variance")}
    assert compute_gaussian_kl(**given) == 0
    with pytest.raises(OptionError, match=says):
        compute_gaussian_kl(**(given | change))


def test_extreme_numbers_are_not_rounded_away() -> None:
    for q, p in ((0.5, 0.5 + 1e-10), (0.3, 0.3 * (1 + 1e-4)), (0.9, 0.9 - 1e-6), (1.0, 1e-320), (1e-5, 5e-324)):
        assert compute_binary_kl(q, p) == pytest.approx(float(precise_kl(q, mpmath.mpf(p))), rel=1e-6)
    assert bound_maurer(0.0, 0.0, 10**9, 1e-320) == pytest.approx(float(-mpmath.expm1(-budget())))
    assert bound_catoni(0.1, 1.0, 10, strength=5e-324) == inf


def budget() -> float:
    """ln(2 sqrt(m) / delta) / m for m = 10^9 and delta = 10^-320."""
    return float((mpmath.log(2 * mpmath.sqrt(10**9)) - mpmath.log(mpmath.mpf(1e-320))) / 10**9)
