"""Every quick contraction against the default made from the dense gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from saltflat.gradients import ColumnLayout, DenseGradient, FactoredGradient, OuterProductGradient, RowSparseGradient
from saltflat.layers import Geometry
from saltflat.results.jackknife import compute_variance_of_mean

LAYOUT = ColumnLayout(fixed=2, draws=2, size=2)
COLUMNS, EXAMPLES = LAYOUT.total, 5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def outer(
    positions: int, groups: int, moving_left: bool, inner: bool = False, rows: int = 3, entries: int = 4
) -> OuterProductGradient:
    left = random(COLUMNS if moving_left else 1, EXAMPLES, groups, positions, rows)
    right = random(1 if moving_left else COLUMNS, EXAMPLES, groups, positions, entries)
    if inner:
        return OuterProductGradient(
            left, right, torch.Size((groups * rows, 2, entries // 2)), (entries // 2, 2), (0, 1, 3, 2)
        )
    return OuterProductGradient(left, right, torch.Size((groups * rows, entries)))


def rows() -> RowSparseGradient:
    index = torch.tensor([[0, 1, 0], [2, 2, 2], [3, 1, 0], [1, 1, 0], [4, 0, 4]])
    return RowSparseGradient(index, random(COLUMNS, EXAMPLES, 3, 2), torch.Size((6, 2)))


FORMS: dict[str, Callable[[], FactoredGradient]] = {
    "dense": lambda: DenseGradient(random(COLUMNS, EXAMPLES, 3, 2)),
    "dense scalar": lambda: DenseGradient(random(COLUMNS, EXAMPLES)),
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
        lambda form: form.sum_squares(),
        lambda form: form.compute_spread(LAYOUT),
        lambda form: form.compute_squared_norms([slice(None)]),
        lambda form: form.compute_squared_norms([slice(0, 2), *LAYOUT.make_group_slices()]),
        lambda form: form.project(random(*form.shape)),
        lambda form: form.sum_weighted(random(COLUMNS, EXAMPLES)),
        lambda form: form.select_columns(slice(1, 4)).sum_squares(),
        lambda form: form.select_columns(slice(1, 2)).compute_gram(
            form.select_columns(slice(3, 4)).select_examples(slice(1, 4))
        ),
    ],
    ids=["squares", "spread", "norms", "norms of groups", "project", "expand", "part", "gram"],
)
def test_a_contraction_is_that_of_the_dense_gradients(
    name: str, contraction: Callable[[FactoredGradient], Tensor]
) -> None:
    form = FORMS[name]()
    torch.testing.assert_close(contraction(form), contraction(DenseGradient(form.to_dense())), rtol=1e-12, atol=1e-12)


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
    unit, units = GEOMETRIES[geometry](form, getattr(form, "groups", 1)).index_units(axis)
    expected = [(form.to_dense() * direction * (unit == u)).flatten(2).sum(2).square().sum() for u in range(units)]
    torch.testing.assert_close(form.sum_unit_squares(direction, unit, units), torch.stack(expected))
    torch.testing.assert_close(
        DenseGradient(form.to_dense()).sum_unit_squares(direction, unit, units), torch.stack(expected)
    )


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("scaled", [False, True])
def test_products_of_rows_are_those_of_the_dense_gradients(name: str, geometry: str, scaled: bool) -> None:
    form = FORMS[name]()
    layout = GEOMETRIES[geometry](form, getattr(form, "groups", 1))
    unit, units = layout.index_units("column")
    scale = (random(units).abs() + 1)[unit] if scaled else None
    gradients = form.to_dense() if scale is None else form.to_dense() * scale
    each = [layout.view_as_matrices(gradient) for gradient in gradients.flatten(0, 1)]
    expected = sum(torch.einsum("gsip,gtip->gst", gradient, gradient) for gradient in each)
    torch.testing.assert_close(form.compute_row_products(layout, scale), expected)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("pairs", [0, 1 << 20])  # without and with a matrix of all pairs of outputs
def test_squares_along_maps_of_inputs_are_those_of_the_dense_gradients(
    name: str, geometry: str, scaled: bool, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("base", "outer"):
        monkeypatch.setattr(f"saltflat.gradients.{module}.MAX_PAIRS", pairs)
    form = FORMS[name]()
    layout = GEOMETRIES[geometry](form, getattr(form, "groups", 1))
    unit, units = layout.index_units("column")
    scale = (random(units).abs() + 1)[unit] if scaled else None
    direction = random(*form.shape)
    W = layout.view_as_matrices(direction).flatten(2)
    gradients = form.to_dense() if scale is None else form.to_dense() * scale
    each = [layout.view_as_matrices(gradient).flatten(2) for gradient in gradients.flatten(0, 1)]
    expected = sum(torch.einsum("gsi,gsj->gij", W, gradient).square().sum() for gradient in each)
    torch.testing.assert_close(form.sum_map_squares(direction, layout, scale), expected)
    torch.testing.assert_close(DenseGradient(form.to_dense()).sum_map_squares(direction, layout, scale), expected)


def test_a_vocabulary_has_no_matrix_of_all_pairs_of_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words, width = 4000, 3
    form = OuterProductGradient(random(2, 5, 1, 4, words), random(1, 5, 1, 4, width), torch.Size((words, width)))
    direction, layout = random(words, width), Geometry(form.shape)
    wanted = DenseGradient(form.to_dense()).sum_map_squares(direction, layout, None)

    def refuse(*args: object) -> None:
        raise AssertionError("a matrix of all pairs, or dense gradients, were made")

    for method in ("compute_row_products", "to_dense"):
        monkeypatch.setattr(OuterProductGradient, method, refuse)
    torch.testing.assert_close(form.sum_map_squares(direction, layout, None), wanted)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_the_sum_of_two_uses_is_the_sum_of_their_gradients(name: str, other: str) -> None:
    one, two = FORMS[name](), FORMS[other]()
    if one.shape != two.shape:
        one, two = one, DenseGradient(random(*one.to_dense().shape))
    torch.testing.assert_close(one.add(two).to_dense(), one.to_dense() + two.to_dense())
    torch.testing.assert_close(one.add(two).sum_squares(), (one.to_dense() + two.to_dense()).square().sum((0, 1)))


def test_the_dense_gradients_of_an_outer_form_are_sums_of_outer_products() -> None:
    form = outer(7, 1, True)
    expected = torch.einsum("knto,nti->knoi", form.left[:, :, 0], form.right[0, :, 0])
    torch.testing.assert_close(form.to_dense(), expected)


def test_small_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: (make().sum_squares(), make().compute_squared_norms([slice(None)])) for name, make in FORMS.items()}
    monkeypatch.setattr("saltflat.gradients.base.CPU_PIECE", 1)
    for name, make in FORMS.items():
        torch.testing.assert_close((make().sum_squares(), make().compute_squared_norms([slice(None)])), whole[name])


def test_the_variance_of_a_mean_of_draws_is_unbiased() -> None:
    draws = torch.randn(100_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    estimates = compute_variance_of_mean(draws.T / 4)
    assert float(estimates.mean()) == pytest.approx(9 / 4, rel=0.02)
