"""Balancing against brute force, closed forms and the laws its minimum obeys."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.testing import assert_close

from saltflat.balance import BalanceResult, balance_bipartite, balance_factored, balance_graph, matrix, solver
from saltflat.errors import OptionError

Balance = Callable[..., BalanceResult]
MATRICES = [balance_bipartite, balance_factored]


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=dice(seed), dtype=torch.float64)


def spread(*shape: int, decades: float, seed: int = 0) -> Tensor:
    """Log-uniform over so many decades up and down."""
    return 10 ** ((2 * uniform(*shape, seed=seed) - 1) * decades)


def graph_of(F: Tensor, U: Tensor, balance: Balance) -> Tensor:
    """The matrix B that is balanced."""
    if balance is balance_factored:
        return F @ U.T
    rows, columns = F.shape
    return torch.cat(
        [torch.cat([F.new_zeros(rows, rows), F], 1), torch.cat([U.T, F.new_zeros(columns, columns)], 1)], 0
    )


def edges_of(B: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    tails, heads = torch.nonzero(B, as_tuple=True)
    return tails, heads, B[tails, heads], len(B)


def brute_force(B: Tensor) -> float:
    """The minimum of sum B[p, q] exp(z[p] - z[q]) over z with z[0] = 0, by a trust region and exact derivatives."""
    b = B.numpy()

    def flow(z: NDArray[np.float64]) -> NDArray[np.float64]:
        z = np.append(0.0, z)
        return np.asarray(b * np.exp(z[:, None] - z[None, :]))

    def total(z: NDArray[np.float64]) -> float:
        return float(flow(z).sum())

    def gradient(z: NDArray[np.float64]) -> NDArray[np.float64]:
        X = flow(z)
        return np.asarray((X.sum(1) - X.sum(0))[1:])

    def hessian(z: NDArray[np.float64]) -> NDArray[np.float64]:
        X = flow(z)
        return np.asarray((np.diag(X.sum(1) + X.sum(0)) - X - X.T)[1:, 1:])

    tolerance = 1e-9 * float(b.sum())
    found = minimize(total, np.zeros(len(b) - 1), jac=gradient, hess=hessian, method="trust-exact", tol=tolerance)
    assert found.success
    return float(found.fun)


def objective(F: Tensor, U: Tensor, balance: Balance, found: BalanceResult) -> Tensor:
    """The sum at the potentials found, term by term."""
    if found.column_potentials is None:
        g = found.potentials
        return (graph_of(F, U, balance) * (g[:, None] - g[None, :]).exp()).sum()
    scales = (found.potentials[:, None] + found.column_potentials[None, :]).exp()
    return (F * scales + U / scales).sum()


@pytest.mark.parametrize("balance", MATRICES)
@pytest.mark.parametrize(("rows", "columns", "decades"), [(1, 5, 1), (5, 1, 1), (6, 9, 0.5), (12, 7, 2)])
def test_the_value_is_that_of_brute_force_and_of_its_potentials(
    balance: Balance, rows: int, columns: int, decades: float
) -> None:
    F, U = spread(rows, columns, decades=decades, seed=1), spread(rows, columns, decades=decades, seed=2)
    B = graph_of(F, U, balance)
    found = balance(F, U)
    assert found.converged
    assert found.attained
    assert found.notes == ()
    assert found.residual <= 1e-10
    wanted = brute_force(B) if len(B) > 1 else float(B)
    assert found.value == pytest.approx(wanted, rel=1e-8)
    assert_close(objective(F, U, balance, found), torch.tensor(found.value, dtype=torch.float64), rtol=1e-12, atol=0)
    as_graph = balance_graph(*edges_of(B))
    assert found.value == pytest.approx(as_graph.value, rel=1e-9)


def test_eliminating_columns_or_rows_gives_twice_the_sum_of_roots() -> None:
    F, U = uniform(6, 9, seed=3), uniform(6, 9, seed=4)
    found = balance_bipartite(F, U)
    assert found.column_potentials is not None
    s, t = found.potentials.exp()[:, None], found.column_potentials.exp()[None, :]
    by_columns = ((F * s).sum(0) * (U / s).sum(0)).sqrt().sum()
    by_rows = ((F * t).sum(1) * (U / t).sum(1)).sqrt().sum()
    assert found.value == pytest.approx(2 * float(by_columns), rel=1e-12)
    assert found.value == pytest.approx(2 * float(by_rows), rel=1e-12)
    assert balance_bipartite(F.T, U.T).value == pytest.approx(found.value, rel=1e-12)


@pytest.mark.parametrize("balance", MATRICES)
@pytest.mark.parametrize("decades", [1, 100])
def test_scaling_rows_and_columns_changes_nothing(balance: Balance, decades: float) -> None:
    F, U = uniform(20, 30, seed=5), uniform(20, 30, seed=6)
    scale = spread(20, 1, decades=decades, seed=7) * spread(1, 30, decades=decades, seed=8)
    plain, scaled = balance(F, U), balance(F / scale, U * scale)
    assert scaled.converged
    assert scaled.value == pytest.approx(plain.value, rel=1e-11)


def test_a_single_row_of_ones_tells_the_two_problems_apart() -> None:
    ones = torch.ones(1, 16)
    assert balance_bipartite(ones, ones).value == pytest.approx(2 * 16, rel=1e-14)
    assert balance_factored(ones, ones).value == pytest.approx(16, rel=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_the_inequalities_between_the_normalized_sharpnesses_hold(seed: int) -> None:
    F, U = uniform(6, 9, seed=seed) ** 3, spread(6, 9, decades=1, seed=seed + 100)
    single = float((F * U).sqrt().sum())
    column = balance_bipartite(F, U).value / 2
    whole = balance_factored(F, U).value ** 0.5
    other_side = balance_factored(F.T, U.T).value ** 0.5
    assert whole < column < 9**0.5 * whole
    assert other_side < column < 6**0.5 * other_side
    assert abs(whole / other_side - 1) > 1e-3
    assert single < column < float((F.sum() * U.sum()).sqrt())


def test_one_column_has_a_closed_form() -> None:
    F, U = spread(300, 9, 1, decades=2, seed=9), spread(300, 9, 1, decades=2, seed=10)
    roots = (F * U).sqrt().sum((1, 2))
    assert_close(balance_bipartite(F, U).values, 2 * roots, rtol=1e-12, atol=0)
    assert_close(balance_factored(F, U).values, roots**2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("balance", MATRICES)
def test_groups_are_problems_of_their_own(balance: Balance) -> None:
    F, U = spread(5, 4, 6, decades=3, seed=11), spread(5, 4, 6, decades=3, seed=12)
    U[2, 1] = 0
    F[4] = 0
    together = balance(F, U)
    alone = [balance(f, u) for f, u in zip(F, U, strict=True)]
    assert_close(together.values, torch.tensor([one.value for one in alone], dtype=torch.float64), rtol=1e-10, atol=0)
    assert together.value == pytest.approx(sum(one.value for one in alone), rel=1e-10)
    assert [one.attained for one in alone] == [True, True, False, True, False]
    assert not together.attained
    assert together.potentials.shape == (5, 4)


@pytest.mark.parametrize("balance", MATRICES)
def test_dead_rows_and_columns_add_nothing(balance: Balance) -> None:
    F, U = uniform(6, 8, seed=13), uniform(6, 8, seed=14)
    F[1] = 0
    U[:, 3] = 0
    rows, columns = torch.arange(6) != 1, torch.arange(8) != 3
    found, rest = balance(F, U), balance(F[rows][:, columns], U[rows][:, columns])
    assert found.converged
    assert not found.attained
    assert found.value == pytest.approx(rest.value, rel=1e-10)
    assert found.potentials.isnan().tolist() == [False, True, False, False, False, False]
    assert found.notes[0].startswith("1 of 6 rows and 1 of 8 columns vanish: rescaling makes them")


@pytest.mark.parametrize("balance", MATRICES)
def test_what_has_no_entries_at_all_is_left_alone(balance: Balance) -> None:
    nothing = balance(torch.zeros(3, 4), torch.zeros(3, 4))
    assert (nothing.value, nothing.residual, nothing.converged, nothing.attained) == (0, 0, True, True)
    assert nothing.potentials.tolist() == [0, 0, 0]
    none = balance(torch.zeros(0, 4), torch.zeros(0, 4))
    assert (none.value, none.converged) == (0, True)
    one_sided = balance(torch.ones(3, 4), torch.zeros(3, 4))
    assert (one_sided.value, one_sided.converged, one_sided.attained) == (0, True, False)


def test_a_triangular_pattern_keeps_only_its_cycles() -> None:
    # row 0 <-> column 0 and row 1 <-> column 1; the entry F[0, 1] leads from the first pair to the second, none back.
    F, U = torch.tensor([[4.0, 7.0], [0.0, 9.0]]), torch.eye(2)
    found = balance_bipartite(F, U)
    assert found.value == pytest.approx(2 * 2 + 2 * 3, rel=1e-12)
    assert not found.attained
    assert found.notes[0].startswith("Entries between separate components vanish: rescaling makes them")
    # The value is approached by moving the pairs apart, never reached.
    assert found.column_potentials is not None
    apart = torch.tensor([-30.0, 0.0], dtype=torch.float64)
    moved = (found.potentials + apart)[:, None] + (found.column_potentials - apart)[None, :]
    total = torch.where(F > 0, F * moved.exp(), 0.0).sum() + torch.where(U > 0, U / moved.exp(), 0.0).sum()
    assert found.value < float(total) < found.value + 1e-9
    closed = F.clone()
    closed[1, 0] = 1.0
    assert balance_bipartite(closed, U).value > found.value + 0.1
    assert balance_factored(F, U).value == pytest.approx(4 + 9, rel=1e-12)


@pytest.mark.parametrize("balance", MATRICES)
def test_separate_blocks_add_up(balance: Balance) -> None:
    F, U = torch.zeros(5, 7, dtype=torch.float64), torch.zeros(5, 7, dtype=torch.float64)
    F[:2, :3], U[:2, :3] = uniform(2, 3, seed=15), uniform(2, 3, seed=16)
    F[2:, 3:], U[2:, 3:] = uniform(3, 4, seed=17), uniform(3, 4, seed=18)
    found = balance(F, U)
    parts = balance(F[:2, :3], U[:2, :3]).value + balance(F[2:, 3:], U[2:, 3:]).value
    assert found.attained
    assert found.value == pytest.approx(parts, rel=1e-11)


@pytest.mark.parametrize("balance", MATRICES)
@pytest.mark.parametrize("density", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_numbers_over_sixty_decades_balance(balance: Balance, density: float, seed: int) -> None:
    F, U = spread(30, 40, decades=30, seed=seed), spread(30, 40, decades=30, seed=seed + 50)
    F, U = F * (uniform(30, 40, seed=seed + 100) < density), U * (uniform(30, 40, seed=seed + 150) < density)
    rows = 2.0 ** torch.randint(-480, 480, (30, 1), generator=dice(seed)).double()
    plain, scaled = balance(F, U), balance(F / rows, U * rows)
    assert plain.converged
    assert scaled.converged
    assert scaled.value == pytest.approx(plain.value, rel=1e-8)
    # The same problem edge by edge: other sweeps, other sums, other units.
    B = graph_of(F, U, balance)
    again = balance_graph(*edges_of(B))
    assert again.value == pytest.approx(plain.value, rel=1e-8)
    columns = plain.column_potentials
    lost = (plain.potentials if columns is None else torch.cat([plain.potentials, columns])).isnan()
    assert torch.equal(again.potentials.isnan(), lost & (B.sum(0) + B.sum(1) > 0))


@pytest.mark.parametrize("balance", MATRICES)
@pytest.mark.parametrize("thread", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("dense", [True, False])
def test_blocks_that_hang_by_threads_balance(
    balance: Balance, thread: float, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps alone would take about 1 / thread of them."""
    if not dense:
        monkeypatch.setattr(solver, "MAX_DENSE_ENTRIES", 0)
    F, U = uniform(12, 15, seed=19), uniform(12, 15, seed=20)
    block = (torch.arange(12) // 4)[:, None] == (torch.arange(15) // 5)[None, :]
    F, U = torch.where(block, F, thread * F), torch.where(block, U, thread * U)
    F[:4, 5:] *= 100
    found = balance(F, U)
    assert found.converged
    assert found.sweeps < 200
    assert found.value == pytest.approx(brute_force(graph_of(F, U, balance)), rel=1e-8)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_flows_too_far_apart_for_one_unit_balance(power: float) -> None:
    # Two blocks whose flows differ by a factor beyond the range of float64.
    F, U = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    size = 1e145 if power == 1 else 1e290
    F[:2, :2], U[:2, :2] = uniform(2, 2, seed=21) * size, uniform(2, 2, seed=22) * size
    F[2:, 2:], U[2:, 2:] = uniform(2, 2, seed=23) / size, uniform(2, 2, seed=24) / size
    balance = balance_factored if power == 1 else balance_bipartite
    found = balance(F, U)
    small = balance(F[2:, 2:] * size, U[2:, 2:] * size)
    assert found.converged
    assert_close(found.potentials[2:] - found.potentials[2], small.potentials - small.potentials[0], rtol=0, atol=1e-8)


def test_a_cycle_has_a_closed_form() -> None:
    weights = spread(12, decades=4, seed=25)
    nodes = torch.arange(12)
    found = balance_graph(nodes, (nodes + 1) % 12, weights, 12)
    assert found.value == pytest.approx(12 * float(weights.log().mean().exp()), rel=1e-10)
    assert found.potentials[0] == 0
    steps = weights.log() + found.potentials - found.potentials.roll(-1)
    assert_close(steps, weights.log().mean().expand(12), rtol=0, atol=1e-8)


@pytest.mark.parametrize("dense", [True, False])
def test_a_cycle_with_chords_is_that_of_brute_force(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dense:
        monkeypatch.setattr(solver, "MAX_DENSE_ENTRIES", 0)
    nodes = torch.arange(9)
    chords = torch.randint(9, (2, 6), generator=dice(26))
    tails, heads = torch.cat([nodes, chords[0]]), torch.cat([(nodes + 1) % 9, chords[1]])
    weights = spread(15, decades=1, seed=27)
    B = torch.zeros(9, 9, dtype=torch.float64).index_put((tails, heads), weights, accumulate=True)
    found = balance_graph(tails, heads, weights, 9)
    assert found.converged
    assert found.value == pytest.approx(brute_force(B), rel=1e-8)


def test_edges_to_oneself_are_constant_and_edges_on_no_cycle_vanish() -> None:
    tails, heads = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([1, 0, 2, 2, 3])
    found = balance_graph(tails, heads, torch.tensor([1.0, 4.0, 50.0, 7.0, 0.0]), 5)
    assert found.value == pytest.approx(2 * 2 + 7, rel=1e-12)
    assert not found.attained
    assert found.notes[0].startswith("1 of 3 edges lie on no cycle")
    assert_close(
        found.potentials,
        torch.tensor([0, -np.log(2), np.nan, 0, 0], dtype=torch.float64),
        equal_nan=True,
        rtol=0,
        atol=1e-9,
    )
    empty = torch.zeros(0, dtype=torch.long)
    assert balance_graph(empty, empty, torch.zeros(0), 3).value == 0


def test_stopping_early_is_said() -> None:
    F, U = spread(8, 8, decades=3, seed=28), spread(8, 8, decades=3, seed=29)
    early, full = balance_bipartite(F, U, limit=1), balance_bipartite(F, U)
    assert full.converged
    assert not early.converged
    assert early.residual > 1e-10
    assert early.sweeps == 1
    assert early.value > full.value
    assert "upper bound" in early.notes[0]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_entries_that_mean_nothing_are_refused(wrong: float) -> None:
    bad, good = torch.tensor([[1.0, wrong]]), torch.ones(1, 2)
    for balance in MATRICES:
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(OptionError, match="Expected finite nonnegative numbers"):
                balance(*pair)
    with pytest.raises(OptionError, match="Expected finite nonnegative numbers"):
        balance_graph(torch.tensor([0, 1]), torch.tensor([1, 0]), bad[0], 2)


def test_shapes_and_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match=r"shapes \(2, 3\) and \(3, 2\)"):
        balance_bipartite(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(OptionError, match="Expected a positive tolerance and limit"):
        balance_factored(torch.ones(2, 3), torch.ones(2, 3), tolerance=0)
    with pytest.raises(OptionError, match="integers from 0 to 1"):
        balance_graph(torch.tensor([0, 2]), torch.tensor([1, 0]), torch.ones(2), 2)


def test_what_is_given_is_left_as_it_was() -> None:
    F, U = uniform(4, 3, seed=30), uniform(4, 3, seed=31)
    F[0] = 0
    copies = F.clone(), U.clone()
    balance_bipartite(F, U)
    balance_factored(F, U)
    assert_close((F, U), copies, rtol=0, atol=0)


def test_a_layer_of_512_by_784_takes_few_sweeps() -> None:
    F, U = uniform(512, 784, seed=32) ** 4, spread(512, 784, decades=2, seed=33)
    start = time.perf_counter()
    found = balance_bipartite(F, U)
    assert found.converged
    assert found.sweeps <= 30
    assert time.perf_counter() - start < 5  # 0.06 s on one idle core


def test_a_matrix_that_is_balanced_again_in_a_block_is_not_solved_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    F, U = uniform(4, 5), uniform(4, 5, seed=1)
    alone = balance_bipartite(F, U)
    solved: list[object] = []

    def counting(*given: Any) -> Any:
        solved.append(given)
        return solver.balance_flow(*given)

    monkeypatch.setattr(matrix, "balance_flow", counting)
    with matrix.share_balances():
        found = [balance_bipartite(F.clone(), U.clone()) for _ in range(2)]
        assert len(solved) == 1
        balance_bipartite(F, U + 1)
        balance_bipartite(F.float(), U.float())
        balance_bipartite(F, U, tolerance=1e-3)
        balance_factored(F, U)
        assert len(solved) == 5
    balance_bipartite(F, U)
    assert len(solved) == 6
    assert [each.value for each in found] == [alone.value] * 2
