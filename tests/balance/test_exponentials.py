"""Balancing linear forms against closed forms, SciPy's minimizers and the definition of vanishing terms."""

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize
from scipy.sparse import csr_array

from saltflat.balance import balance_forms, solver
from saltflat.balance.exponentials import find_recession_direction
from saltflat.errors import OptionError

Array = NDArray[np.float64]


def matrix(rows: list[list[float]] | Array) -> csr_array:
    return csr_array(np.asarray(rows, dtype=np.float64))


def sparse_rows(scales: int, terms: int, most: int, sizes: list[float], dice: np.random.Generator) -> Array:
    """Rows of 1 to so many entries of these sizes, with any signs."""
    dense = np.zeros((terms, scales))
    for row in dense:
        count = dice.integers(1, min(most, scales) + 1)
        row[dice.choice(scales, count, replace=False)] = dice.choice(sizes, count) * dice.choice([-1.0, 1.0], count)
    return dense


def differences(scales: int, terms: int, dice: np.random.Generator) -> Array:
    """Edges of a graph in which scale 0 is the ground."""
    dense = np.zeros((terms, scales + 1))
    for row in dense:
        row[dice.choice(scales + 1, 2, replace=False)] = [1.0, -1.0]
    return dense[:, 1:]


KINDS: dict[str, Callable[[int, int, np.random.Generator], Array]] = {
    "differences": differences,
    "twice differences": lambda scales, terms, dice: -2 * differences(scales, terms, dice),
    "sums and differences": lambda scales, terms, dice: sparse_rows(scales, terms, 2, [1.0], dice),
    "halves": lambda scales, terms, dice: sparse_rows(scales, terms, 2, [0.5], dice),
    "three entries": lambda scales, terms, dice: sparse_rows(scales, terms, 3, [1.0], dice),
    "powers": lambda scales, terms, dice: sparse_rows(scales, terms, 4, [0.5, 1.0, 2.0], dice),
}


def problem(kind: str, scales: int, seed: int, terms: int | None = None) -> tuple[csr_array, Array]:
    """Log-normal weights, one in ten of them 0, and one constant term."""
    dice = np.random.default_rng(seed)
    A = KINDS[kind](scales, terms or 4 * scales, dice)
    A[-1] = 0
    weights = np.exp(2 * dice.standard_normal(len(A))) * (dice.random(len(A)) > 0.1)
    return matrix(A), weights


def vanishing_by_definition(A: csr_array, weights: Array) -> NDArray[np.bool_]:
    """Term by term: is there a direction that lowers this one, and lifts none?"""
    there = weights > 0
    rows = A.toarray()[there]
    vanishing = np.zeros(len(weights), dtype=bool)
    if len(rows):
        box = [(-1.0, 1.0)] * rows.shape[1]
        steepest = [linprog(row, A_ub=rows, b_ub=np.zeros(len(rows)), bounds=box).fun for row in rows]
        vanishing[there] = np.array(steepest, dtype=np.float64) < -1e-7
    return vanishing


def brute_force(A: csr_array, weights: Array) -> float:
    """The minimum over all scales, by a trust region and exact derivatives."""
    a = A.toarray()
    unit = float(weights.sum())

    def terms(s: Array) -> Array:
        return np.asarray(weights / unit * np.exp(a @ s))

    def total(s: Array) -> float:
        return float(terms(s).sum())

    def gradient(s: Array) -> Array:
        return np.asarray(a.T @ terms(s))

    def hessian(s: Array) -> Array:
        return np.asarray((a.T * terms(s)) @ a)

    found = minimize(total, np.zeros(a.shape[1]), jac=gradient, hess=hessian, method="trust-ncg", tol=1e-9)
    # SciPy calls it a failure where rounding ends the descent; what counts is that it is at the bottom.
    assert np.abs(gradient(found.x)).max() <= 1e-8 * found.fun
    return unit * float(found.fun)


@cache
def solved(kind: str, scales: int, seed: int) -> tuple[csr_array, Array, Array, float]:
    """A problem, its weights without those that vanish, and its infimum."""
    A, weights = problem(kind, scales, seed)
    kept = np.where(vanishing_by_definition(A, weights), 0.0, weights)
    return A, weights, kept, brute_force(A, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", [2, 5, 12, 30])
@pytest.mark.parametrize("dense", [True, False])
def test_the_value_is_that_of_brute_force_and_of_its_potentials(
    kind: str, scales: int, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dense:
        monkeypatch.setattr(solver, "MAX_DENSE_ENTRIES", 0)
    for seed in range(3 if scales < 30 else 1):
        A, weights, kept, value = solved(kind, scales, seed)
        found = balance_forms(A, weights)
        assert found.converged
        assert found.residual <= 1e-10
        assert found.value == pytest.approx(value, rel=1e-8)
        np.testing.assert_allclose(found.terms, kept * np.exp(A @ found.potentials), rtol=1e-12)
        assert found.value == pytest.approx(found.terms.sum(), rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [1, 2, 4])
def test_terms_vanish_if_some_direction_lowers_them_and_raises_no_other(kind: str, density: int) -> None:
    fates = set()
    for seed in range(5):
        A, weights = problem(kind, 9, seed + 100, terms=9 * density)
        found = balance_forms(A, weights)
        wanted = vanishing_by_definition(A, weights)
        np.testing.assert_array_equal(found.vanishing, wanted)
        assert found.attained == (not wanted.any())
        moves = A @ found.recession_direction
        assert np.all(moves[wanted] <= -1 + 1e-9)
        np.testing.assert_allclose(moves[(weights > 0) & ~wanted], 0, atol=1e-9)
        assert found.attained == bool((found.recession_direction == 0).all())
        far = weights[weights > 0] * np.exp(A[weights > 0] @ (found.potentials + 60 * found.recession_direction))
        assert far.sum() == pytest.approx(found.value, rel=1e-6)
        fates |= set(wanted[weights > 0].tolist())
    assert fates == {True, False}


def test_a_row_may_have_any_length_where_only_its_direction_matters() -> None:
    dice = np.random.default_rng(5)
    for kind in KINDS:
        for seed in range(20):
            A, weights = problem(kind, 9, seed + 200, terms=18)
            A = A[(weights > 0) & (np.diff(A.indptr) > 0)]
            vanishing, _ = find_recession_direction(A)
            stretched, direction = find_recession_direction(
                csr_array(A * (10 ** dice.uniform(-6, 6, A.shape[0]))[:, None])
            )
            np.testing.assert_array_equal(stretched, vanishing)
            assert np.all((A @ direction)[vanishing] < 0)


def test_terms_that_fall_only_after_others_vanish_too() -> None:
    """Each term has ten times less room than the one before it: no single direction is steep for all."""
    links = 8
    dense = np.zeros((links + 1, links + 2))
    for link in range(links):
        dense[link, [link, link + 1]] = [-10.0, 1.0]  # falls only if the next scale grows ten times slower
    dense[links, [0, links, links + 1]] = [1.0, -1.0, -1.0]
    A, weights = csr_array(dense), np.ones(links + 1)
    found = balance_forms(A, weights)
    np.testing.assert_array_equal(found.vanishing, vanishing_by_definition(A, weights))
    assert found.vanishing.all()
    assert found.value == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", [4, 40])
def test_rescaling_changes_nothing(kind: str, scales: int) -> None:
    for seed in range(3):
        A, weights = problem(kind, scales, seed + 300)
        shift = np.random.default_rng(seed).uniform(-8, 8, scales)
        plain, moved = balance_forms(A, weights), balance_forms(A, weights * np.exp(A @ shift))
        assert moved.converged
        assert moved.value == pytest.approx(plain.value, rel=1e-8)
        np.testing.assert_array_equal(moved.vanishing, plain.vanishing)
        np.testing.assert_allclose(moved.terms, plain.terms, rtol=1e-6)


def test_a_cycle_is_its_length_times_the_geometric_mean() -> None:
    weights = np.exp(3 * np.random.default_rng(6).standard_normal(12))
    found = balance_forms(csr_array(np.eye(12) - np.roll(np.eye(12), 1, axis=1)), weights)
    assert found.value == pytest.approx(12 * np.exp(np.log(weights).mean()), rel=1e-10)
    assert found.attained
    assert found.notes == ()


def test_a_chain_of_layers_has_a_closed_form() -> None:
    # Factors a and 1/a of two layers: W1 / a^2 + b1 / a^2 + W2 a^2 + b2.
    W1, b1, W2, b2 = 3.0, 5.0, 2.0, 7.0
    found = balance_forms(matrix([[-2.0], [-2.0], [2.0], [0.0]]), np.array([W1, b1, W2, b2]))
    assert found.value == pytest.approx(2 * ((W1 + b1) * W2) ** 0.5 + b2, rel=1e-12)
    assert found.potentials[0] == pytest.approx(np.log((W1 + b1) / W2) / 4, rel=1e-10)
    # Without biases: D times the D-th root of the product.
    traces = np.array([3.0, 0.1, 20.0, 7.0])
    layers = csr_array(-2 * (np.eye(4)[:, :3] - np.eye(4, k=-1)[:, :3]))
    assert balance_forms(layers, traces).value == pytest.approx(4 * traces.prod() ** 0.25, rel=1e-12)


def test_a_query_and_a_key_have_twice_the_root_of_their_product() -> None:
    found = balance_forms(matrix([[2.0], [-2.0]]), np.array([3.0, 27.0]))
    assert found.value == pytest.approx(2 * (3 * 27) ** 0.5, rel=1e-12)
    np.testing.assert_allclose(found.terms, [9, 9], rtol=1e-9)


def test_sums_of_scales_worked_by_hand() -> None:
    # 2 e^(u+v) + 4 e^-u + 8 e^-v: all three are equal at the minimum, and their product is 64.
    found = balance_forms(matrix([[1.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]), np.array([2.0, 4.0, 8.0]))
    assert found.value == pytest.approx(3 * 4, rel=1e-12)
    np.testing.assert_allclose(found.potentials, [0, np.log(2)], atol=1e-9)
    # e^(u+v) + 4 e^(u-v) + 9 e^-u: over v first, 4 e^u + 9 e^-u. No change of signs makes a graph of this.
    found = balance_forms(matrix([[1.0, 1.0], [1.0, -1.0], [-1.0, 0.0]]), np.array([1.0, 4.0, 9.0]))
    assert found.value == pytest.approx(12, rel=1e-12)
    np.testing.assert_allclose(found.potentials, np.log([1.5, 2]), atol=1e-9)


def test_three_scales_and_powers_worked_by_hand() -> None:
    # e^(u+v+w) + e^-u + e^-v + e^-w, weighted: four equal terms.
    rows = matrix([[1.0, 1.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])
    assert balance_forms(rows, np.array([2.0, 4.0, 1.0, 2.0])).value == pytest.approx(4 * 16**0.25, rel=1e-12)
    # 3 x^2 + 8 x^(-1/2): 6 x^2 = 4 x^(-1/2).
    x = (2 / 3) ** 0.4
    found = balance_forms(matrix([[2.0], [-0.5]]), np.array([3.0, 8.0]))
    assert found.value == pytest.approx(3 * x**2 + 8 * x**-0.5, rel=1e-12)
    assert found.potentials[0] == pytest.approx(np.log(x), rel=1e-9)


def test_a_dead_unit_and_what_feeds_it_are_named() -> None:
    # Unit v has no outgoing weight: what enters it can be scaled away, all else stays.
    A = matrix([[-2.0, 0.0], [2.0, 0.0], [2.0, -2.0], [0.0, 2.0], [0.0, 0.0]])
    found = balance_forms(A, np.array([4.0, 9.0, 50.0, 0.0, 1.0]))
    assert found.value == pytest.approx(2 * 6 + 1, rel=1e-12)
    assert found.vanishing.tolist() == [False, False, True, False, False]
    assert found.recession_direction.tolist() == [0.0, 0.5]
    assert not found.attained
    assert found.converged
    assert found.potentials[1] == 0
    assert found.notes[0].startswith("1 of 4 terms vanish: rescaling makes them")


def test_flows_too_far_apart_for_one_unit_balance() -> None:
    A = matrix([[1.0, 1.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    small = np.array([1e-300, 4e-300, 9e-300])
    far = matrix([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, -1.0], [0.0, 0.0, -1.0, 0.0]])
    both = csr_array(np.vstack([A.toarray(), far.toarray()]))
    found = balance_forms(both, np.concatenate([small, small * 1e300 * 1e290]))
    assert found.converged
    np.testing.assert_allclose(found.potentials, np.tile(np.log([1.5, 2]), 2), atol=1e-9)


def test_nothing_to_balance_is_an_answer() -> None:
    assert balance_forms(csr_array((0, 3)), np.zeros(0)).value == 0
    scaleless = balance_forms(csr_array((2, 0)), np.array([2.0, 3.0]))
    assert (scaleless.value, scaleless.potentials.shape, scaleless.attained) == (5.0, (0,), True)
    for kind in KINDS:
        A, weights = problem(kind, 5, 400)
        silent = balance_forms(A, 0 * weights)
        assert (silent.value, silent.residual, silent.converged, silent.attained) == (0.0, 0.0, True, True)
        assert not silent.potentials.any()
        assert not silent.vanishing.any()


def test_entries_given_twice_or_as_zeros_count_as_they_should_and_stay() -> None:
    # exp(u) + 4 exp(-u) + 3, as 1/2 + 1/2, as -1 with a 0 beside it, and as 1 - 1.
    data, columns, starts = [0.5, 0.5, -1.0, 0.0, 1.0, -1.0], [0, 0, 0, 1, 1, 1], [0, 2, 4, 6]
    A, weights = csr_array((data, columns, starts), shape=(3, 2)), torch.tensor([1.0, 4.0, 3.0])
    found = balance_forms(A, weights)
    assert found.value == pytest.approx(2 * 2 + 3, rel=1e-12)
    assert found.attained
    assert (A.data.tolist(), A.indices.tolist(), A.indptr.tolist()) == (data, columns, starts)
    assert weights.tolist() == [1.0, 4.0, 3.0]
    assert balance_forms(A, weights.numpy()).value == found.value


def test_stopping_early_is_said() -> None:
    A, weights = problem("sums and differences", 20, 7)
    early, full = balance_forms(A, weights, limit=1), balance_forms(A, weights)
    assert full.converged
    assert not early.converged
    assert early.sweeps == 1
    assert early.residual > 1e-10
    assert early.value > full.value
    assert "upper bound" in early.notes[-1]


def test_what_means_nothing_is_refused() -> None:
    A, good = matrix([[1.0], [-1.0]]), np.ones(2)
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(OptionError, match="Expected finite nonnegative numbers"):
            balance_forms(A, np.array([1.0, wrong]))
    for weights in (np.ones(3), np.ones((2, 1)), np.float64(1.0)):
        with pytest.raises(OptionError, match=r"forms of shape \(2, 1\) and weights of shape"):
            balance_forms(A, np.asarray(weights))
    for bad in (np.nan, np.inf):
        with pytest.raises(OptionError, match="Expected finite forms"):
            balance_forms(matrix([[1.0], [bad]]), good)
    for tolerance, limit in ((0.0, 9), (np.nan, 9), (1e-10, 0)):
        with pytest.raises(OptionError, match="Expected a positive tolerance and limit"):
            balance_forms(A, good, tolerance, limit)


def residual_network(widths: list[int]) -> csr_array:
    """Units of blocks with a hidden layer each on one stream, with biases: -2 times (unit led to - unit come from)."""
    scales, rows, stream = widths[0], [], np.arange(widths[0])
    ground = np.array([-1])
    for width in widths:
        hidden = np.arange(scales, scales + width)
        wider = np.append(stream, np.arange(scales + width, scales + 2 * width - len(stream)))
        scales += len(hidden) + len(wider) - len(stream)
        rows += [(hidden, np.append(stream, ground)), (wider, np.append(hidden, ground))]
        stream = wider
    rows += [(np.arange(widths[0]), np.array([-1, -1])), (ground, stream)]
    ends = np.concatenate([np.stack(np.meshgrid(heads, tails), -1).reshape(-1, 2) for heads, tails in rows])
    A = csr_array((np.tile([-2.0, 2.0], len(ends)), ends.ravel() + 1, 2 * np.arange(len(ends) + 1)))
    return csr_array(A[:, 1:])


def test_the_units_of_a_residual_network_balance_quickly() -> None:
    A = residual_network([16] * 3 + [32] * 3 + [64] * 3)
    dice = np.random.default_rng(8)
    weights = np.exp(3 * dice.standard_normal(A.shape[0])) * (dice.random(A.shape[0]) > 0.1)
    assert A.shape[1] == 400
    assert A.shape[0] > 25_000
    start = time.perf_counter()
    found = balance_forms(A, weights * np.exp(A @ dice.uniform(-4, 4, 400)))
    assert time.perf_counter() - start < 3  # 0.03 s on one idle core
    assert found.converged
    assert found.attained
    assert found.sweeps < 100
    assert found.value == pytest.approx(balance_forms(A, weights).value, rel=1e-8)
