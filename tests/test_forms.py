"""Every quick contraction against the default made from the dense gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from saltflat.errorbars import variance_of_mean
from saltflat.forms import Dense, Form, Layout, Outer, Rows
from saltflat.geometry import Geometry

LAYOUT = Layout(fixed=2, draws=2, size=2)
COLUMNS, EXAMPLES = LAYOUT.total, 5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def outer(
    positions: int, groups: int, moving_left: bool, inner: bool = False, rows: int = 3, entries: int = 4
) -> Outer:
    left = random(COLUMNS if moving_left else 1, EXAMPLES, groups, positions, rows)
    right = random(1 if moving_left else COLUMNS, EXAMPLES, groups, positions, entries)
    if inner:
        return Outer(left, right, torch.Size((groups * rows, 2, entries // 2)), (entries // 2, 2), (0, 1, 3, 2))
    return Outer(left, right, torch.Size((groups * rows, entries)))


def rows() -> Rows:
    index = torch.tensor([[0, 1, 0], [2, 2, 2], [3, 1, 0], [1, 1, 0], [4, 0, 4]])
    return Rows(index, random(COLUMNS, EXAMPLES, 3, 2), torch.Size((6, 2)))


FORMS: dict[str, Callable[[], Form]] = {
    "dense": lambda: Dense(random(COLUMNS, EXAMPLES, 3, 2)),
    "dense scalar": lambda: Dense(random(COLUMNS, EXAMPLES)),
    "one position": lambda: outer(1, 1, True),
    "one position, columns on the right": lambda: outer(1, 2, False),
    "many positions": lambda: outer(7, 2, True, inner=True),
    "many positions, columns on the right": lambda: outer(7, 2, False, inner=True),
    "few positions, wide": lambda: outer(2, 1, True, rows=30, entries=40),
    "few positions, wide, columns on the right": lambda: outer(2, 3, False, rows=30, entries=40),
    "rows": rows,
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "contraction",
    [
        lambda form: form.squares(),
        lambda form: form.spread(LAYOUT),
        lambda form: form.norms([slice(None)]),
        lambda form: form.norms([slice(0, 2), *LAYOUT.groups()]),
        lambda form: form.project(random(*form.shape)),
        lambda form: form.expand(random(COLUMNS, EXAMPLES)),
        lambda form: form.part(slice(1, 4)).squares(),
        lambda form: form.part(slice(1, 2)).gram(form.part(slice(3, 4)).select(slice(1, 4))),
    ],
    ids=["squares", "spread", "norms", "norms of groups", "project", "expand", "part", "gram"],
)
def test_a_contraction_is_that_of_the_dense_gradients(name: str, contraction: Callable[[Form], Tensor]) -> None:
    form = FORMS[name]()
    torch.testing.assert_close(contraction(form), contraction(Dense(form.dense())), rtol=1e-12, atol=1e-12)


MATRICES = [name for name in FORMS if len(FORMS[name]().shape) > 1]
GEOMETRIES = {
    "outputs first": lambda form, groups: Geometry(form.shape, groups),
    "inputs first": lambda form, groups: Geometry(form.shape, groups, inputs_first=True),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("axis", ["column", "row"])
def test_squares_by_unit_are_those_of_the_dense_gradients(name: str, geometry: str, axis: str) -> None:
    form = FORMS[name]()
    direction = random(*form.shape)
    unit, units = GEOMETRIES[geometry](form, getattr(form, "groups", 1)).units(axis)
    expected = [(form.dense() * direction * (unit == u)).flatten(2).sum(2).square().sum() for u in range(units)]
    torch.testing.assert_close(form.unit_squares(direction, unit, units), torch.stack(expected))
    torch.testing.assert_close(Dense(form.dense()).unit_squares(direction, unit, units), torch.stack(expected))


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("scaled", [False, True])
def test_products_of_rows_are_those_of_the_dense_gradients(name: str, geometry: str, scaled: bool) -> None:
    form = FORMS[name]()
    layout = GEOMETRIES[geometry](form, getattr(form, "groups", 1))
    unit, units = layout.units("column")
    scale = (random(units).abs() + 1)[unit] if scaled else None
    gradients = form.dense() if scale is None else form.dense() * scale
    each = [layout.matrices(gradient) for gradient in gradients.flatten(0, 1)]
    expected = sum(torch.einsum("gsip,gtip->gst", gradient, gradient) for gradient in each)
    torch.testing.assert_close(form.row_products(layout, scale), expected)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_the_sum_of_two_uses_is_the_sum_of_their_gradients(name: str, other: str) -> None:
    one, two = FORMS[name](), FORMS[other]()
    if one.shape != two.shape:
        one, two = one, Dense(random(*one.dense().shape))
    torch.testing.assert_close(one.joined(two).dense(), one.dense() + two.dense())
    torch.testing.assert_close(one.joined(two).squares(), (one.dense() + two.dense()).square().sum((0, 1)))


def test_the_dense_gradients_of_an_outer_form_are_sums_of_outer_products() -> None:
    form = outer(7, 1, True)
    expected = torch.einsum("knto,nti->knoi", form.left[:, :, 0], form.right[0, :, 0])
    torch.testing.assert_close(form.dense(), expected)


def test_small_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: (make().squares(), make().norms([slice(None)])) for name, make in FORMS.items()}
    monkeypatch.setattr("saltflat.forms.base.CPU_PIECE", 1)
    for name, make in FORMS.items():
        torch.testing.assert_close((make().squares(), make().norms([slice(None)])), whole[name])


def test_the_variance_of_a_mean_of_draws_is_unbiased() -> None:
    draws = torch.randn(100_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    estimates = variance_of_mean(draws.T / 4)
    assert float(estimates.mean()) == pytest.approx(9 / 4, rel=0.02)
