"""Balancing in a box against a quasi-Newton method with bounds, and its optimality conditions."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from saltflat.balance import balance_bipartite, balance_in_box
from saltflat.errors import OptionError


def spread(*shape: int, decades: float, seed: int) -> Tensor:
    """Log-uniform over so many decades up and down."""
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 10 ** ((2 * uniform - 1) * decades)


def search(F: Tensor, U: Tensor, radius: float) -> float:
    """The minimum over the box by L-BFGS-B."""
    f, u = F.numpy(), U.numpy()
    rows, columns = f.shape

    def total(z: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        sums = z[:rows, None] + z[None, rows:]
        up, down = f * np.exp(sums), u * np.exp(-sums)
        return float((up + down).sum()), np.concatenate([(up - down).sum(1), (up - down).sum(0)])

    bounds = [(-radius, radius)] * (rows + columns)
    found = minimize(
        total,
        np.zeros(rows + columns),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 100_000, "maxfun": 100_000, "ftol": 1e-16, "gtol": 1e-13, "maxcor": 50},
    )
    return float(found.fun)


@pytest.mark.parametrize(
    ("rows", "columns", "decades", "radius"),
    [(1, 1, 1, 0.5), (6, 9, 0.5, 0.2), (6, 9, 0.5, 10), (12, 7, 2, 3), (7, 12, 8, 6), (20, 30, 20, 8), (40, 60, 3, 1)],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_the_value_is_that_of_a_search_with_bounds(
    rows: int, columns: int, decades: float, radius: float, zeros: bool
) -> None:
    F, U = spread(rows, columns, decades=decades, seed=1), spread(rows, columns, decades=decades, seed=2)
    if zeros and rows > 4:
        F[0] = 0
        U[:, 1] = 0
        F[3] = U[3] = 0
        F[:, 4] = U[:, 4] = 0
        F[2, 5:] = 0
    found = balance_in_box(F, U, radius)
    assert found.converged
    assert found.notes == ()
    assert found.column_potentials is not None
    assert found.value == pytest.approx(search(F, U, radius), rel=1e-10)
    x, y = found.potentials, found.column_potentials
    assert max(float(x.abs().max()), float(y.abs().max())) <= radius
    sums = x[:, None] + y[None, :]
    up, down = F * sums.exp(), U * (-sums).exp()
    assert found.value == pytest.approx(float((up + down).sum()), rel=1e-13)
    # Free potentials are balanced, and the others are pushed out of the box.
    for z, axis in ((x, 1), (y, 0)):
        slope, size = (up - down).sum(axis), (up + down).sum(axis)
        free = z.abs() < radius
        assert bool((slope[free].abs() <= 1e-9 * size[free]).all())
        assert bool((slope[z >= radius] <= 1e-9 * size[z >= radius]).all())
        assert bool((slope[z <= -radius] >= -1e-9 * size[z <= -radius]).all())
    torch.testing.assert_close(found.slopes, torch.where(F > 0, sums.exp(), 0.0), rtol=1e-13, atol=0)


def test_a_wide_box_has_the_minimum_without_a_box() -> None:
    F, U = spread(12, 20, decades=2, seed=3), spread(12, 20, decades=2, seed=4)
    assert balance_in_box(F, U, 50.0).value == pytest.approx(balance_bipartite(F, U).value, rel=1e-12)
    assert balance_in_box(F, U, 0.1).value > balance_bipartite(F, U).value


def test_groups_are_separate_and_sides_are_alike() -> None:
    F, U = spread(3, 6, 4, decades=3, seed=5), spread(3, 6, 4, decades=3, seed=6)
    found = balance_in_box(F, U, 2.0)
    alone = [balance_in_box(f, u, 2.0).value for f, u in zip(F, U, strict=True)]
    torch.testing.assert_close(found.values, torch.tensor(alone, dtype=torch.float64), rtol=1e-12, atol=0)
    assert balance_in_box(F.mT, U.mT, 2.0).value == pytest.approx(found.value, rel=1e-12)


def test_a_slow_problem_converges() -> None:
    # Half of the columns push outward, and the entries of the others differ by twelve decades.
    F, U = spread(60, 120, decades=6, seed=7), spread(60, 120, decades=1, seed=8)
    F[:, :60] = 0
    found = balance_in_box(F, U, 12.0)
    assert found.converged
    assert found.sweeps < 2000


def test_too_few_sweeps_are_reported() -> None:
    F, U = spread(20, 30, decades=6, seed=9), spread(20, 30, decades=6, seed=10)
    found = balance_in_box(F, U, 8.0, limit=1)
    assert not found.converged
    assert found.residual > 1e-10
    assert "upper bound" in found.notes[0]
    assert found.value >= balance_in_box(F, U, 8.0).value


@pytest.mark.parametrize("radius", [0.0, -1.0, float("inf"), float("nan"), True])
def test_the_radius_is_positive_and_finite(radius: float) -> None:
    with pytest.raises(OptionError, match=r"Expected a positive number, but got radius="):
        balance_in_box(torch.ones(1, 1), torch.ones(1, 1), radius)


def test_shapes_must_agree_and_entries_be_nonnegative() -> None:
    with pytest.raises(OptionError, match="two matrices of the same shape"):
        balance_in_box(torch.ones(2, 3), torch.ones(3, 2), 1.0)
    with pytest.raises(OptionError, match="nonnegative"):
        balance_in_box(-torch.ones(2, 3), torch.ones(2, 3), 1.0)
