"""Outermost eigenvalues and spectral densities against dense ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import oracle
import pytest
import torch
from cases import CASES, Case, problem, reals
from curvature_cases import CubeOnce, cubed, dense, matrix_with
from numpy.typing import NDArray
from promise_cases import snapshot
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.engine.eigenvalues import find_extreme_eigenvalues
from saltflat.engine.lanczos import EigenvalueSearch, compute_quadratures
from saltflat.errors import ModelError, NonFiniteError, OptionError, ParameterError, ReportError, UnknownNameError
from saltflat.spectrum import Block, Spectrum

Array = NDArray[np.float64]
Matrix: TypeAlias = Literal["hessian", "gauss_newton"]

NETWORKS = [
    *("biased_mlp", "gelu_mlp", "frozen_parameters", "residual_with_batch_norm", "tied_embedding_and_output"),
    *("attention_by_hand", "one_example", "squared_error", "lstm_in_two_directions", "layer_never_called"),
]


def gauss_newton(case: Case) -> Tensor:
    parts = oracle.linearized(case)
    jacobian = torch.cat(list(parts.jacobians.values()), -1)
    return (jacobian.mT @ parts.curvatures @ jacobian).sum(0)


def matrix_of(name: str, matrix: str) -> Tensor:
    return dense(name)[2] if matrix == "hessian" else gauss_newton(CASES[name]())


def values_of(matrix: Tensor) -> Array:
    """In descending order."""
    found: Array = torch.linalg.eigvalsh(matrix).flip(0).numpy()
    return found


def trained() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """An MLP of 171 parameters near a minimum: a few outliers and many eigenvalues around zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    inputs = torch.randn(80, 6).double()
    labels = inputs[:, :3].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model.eval(), (inputs, labels)


def dense_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    case = Case(model, [data], "cross_entropy", F.cross_entropy)
    copied, parameters = oracle.frozen_copy(model)
    names, sizes = list(parameters), [each.numel() for each in parameters.values()]

    def of_all(row: Tensor) -> Tensor:
        parts = zip(names, row.split(sizes), strict=True)
        shaped = {name: part.reshape(parameters[name].shape) for name, part in parts}
        return oracle.loss_at(case, torch.func.functional_call(copied, shaped, (data[0],)))

    return oracle.hessian(of_all, torch.cat([each.flatten() for each in parameters.values()]))


# Eigenvalues.


@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_outermost_eigenvalues_are_the_dense_ones(name: str, matrix: Matrix) -> None:
    case, wanted = CASES[name](), values_of(matrix_of(name, matrix))
    found = saltflat.compute_spectrum(
        case.model, case.batches, case.loss, k=6, smallest=3, matrix=matrix, density=False, dtype=torch.float64
    )
    largest, smallest = found.eigenvalues[:6], found.eigenvalues[6:]
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(largest, wanted[:6], rtol=1e-7, atol=1e-13 * scale)
    np.testing.assert_allclose(smallest, wanted[-3:], rtol=0, atol=1e-6 * scale)
    assert found.only_block.complete
    for pair, value in zip(found.largest, wanted, strict=False):
        assert pair.converged
        assert abs(pair.value - value) <= pair.bound


@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
@pytest.mark.parametrize(
    "name", ["biased_mlp", "gelu_mlp", "residual_with_batch_norm", "factors_and_shifts_of_channels"]
)
def test_the_spectra_of_layers_are_those_of_the_dense_blocks(name: str, matrix: Matrix) -> None:
    case, whole = CASES[name](), matrix_of(name, matrix)
    found = saltflat.compute_spectrum(
        case.model, case.batches, case.loss, k=3, matrix=matrix, per="layer", draws=16, steps=15
    )
    assert list(found) == list(oracle.trainable(case.model))
    first = 0
    for block in found.values():
        entries = slice(first, first + block.parameters)
        first += block.parameters
        wanted = values_of(whole[entries, entries])
        np.testing.assert_allclose(block.eigenvalues, wanted[: len(block.largest)], rtol=1e-7, atol=1e-14)
        assert abs(block.trace - wanted.sum()) <= 5 * block.trace_stderr + 1e-12 * np.abs(wanted).max()
    assert first == len(whole)


def drawing(size: int) -> Callable[[int], dict[str, Tensor]]:
    def draw(number: int) -> dict[str, Tensor]:
        noise = torch.Generator().manual_seed(number + 100)
        return {"a": torch.randn(size, dtype=torch.float64, generator=noise)}

    return draw


def spread(*values: float, low: float = -0.5, high: float = 0.9, size: int = 200) -> Tensor:
    inner = torch.linspace(low, high, size - len(values), dtype=torch.float64)
    return torch.cat([inner, torch.tensor(values, dtype=torch.float64)])


REPEATED = {
    "largest five times": spread(1.0, 1.0, 1.0, 1.0, 1.0),
    "second three times": spread(2.0, 1.5, 1.5, 1.5),
    "smallest twice": spread(-3.0, -3.0, 4.0),
    "both ends": spread(-3.0, -3.0, -3.0, 4.0, 4.0),
    "rank two": torch.cat([torch.zeros(98, dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)]),
    "all alike": torch.full((40,), 2.5, dtype=torch.float64),
    "zero": torch.zeros(40, dtype=torch.float64),
    "all negative": spread(-7.0, low=-3, high=-1),
    "over many decades": torch.logspace(-12, 3, 120, dtype=torch.float64),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_repeated_eigenvalues_are_found_as_often_as_they_are_there(name: str, seed: int) -> None:
    values = REPEATED[name]
    matrix, draw = matrix_with(values), drawing(len(values))
    found = find_extreme_eigenvalues(
        lambda v: {"a": v["a"] @ matrix}, lambda number: draw(number + 1000 * seed), 6, 3, basis=60
    )["a"]
    ordered = values.sort(descending=True).values
    wanted = torch.cat([ordered[:6], ordered.flip(0)[:3]])
    scale = float(values.abs().max())
    torch.testing.assert_close(found.values[:6], wanted[:6], rtol=1e-9, atol=1e-11 * scale)
    torch.testing.assert_close(found.values[6:], wanted[6:], rtol=0, atol=1e-5 * scale)
    assert found.complete
    assert bool(found.converged.all())
    torch.testing.assert_close(found.vectors @ found.vectors.mT, torch.eye(9, dtype=torch.float64))


def test_one_search_alone_misses_a_repeated_eigenvalue() -> None:
    """What the second search is for."""
    outer = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64)
    matrix = matrix_with(torch.cat([torch.linspace(0, 0.1, 197, dtype=torch.float64), outer]))
    run = EigenvalueSearch(drawing(200)(0)["a"], 1e-8, 60, largest=2, relative=1e-3)
    while not run.done:
        run.add_product(matrix @ run.next)
    assert run.values.tolist() == pytest.approx([1, 0.5])
    both = find_extreme_eigenvalues(lambda v: {"a": v["a"] @ matrix}, drawing(200), 2)["a"]
    assert both.values.tolist() == pytest.approx([1, 1])


def test_a_network_with_equal_outputs_has_each_eigenvalue_as_often_as_outputs() -> None:
    inputs = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64))
    model = nn.Linear(4, 3, bias=False).double()
    found = saltflat.compute_spectrum(model, (inputs, torch.zeros(4, 3).double()), "mse", k=7, smallest=4)
    # Each of the outputs has the Hessian (2 / 12) X'X.
    wanted = [x**2 / 6 for x in (4, 4, 4, 3, 3, 3, 2, 2, 1, 1, 1)]
    np.testing.assert_allclose(found.eigenvalues, wanted, rtol=1e-12)
    assert found.only_block.complete


def test_too_few_steps_are_said() -> None:
    matrix = matrix_with(spread(1.0))
    found = find_extreme_eigenvalues(lambda v: {"a": v["a"] @ matrix}, drawing(200), 6, steps=8, basis=60)["a"]
    assert not bool(found.converged.all())
    wanted = torch.linalg.eigvalsh(matrix)
    # There is an eigenvalue within the bound, though not the one that was wanted.
    assert bool(((found.values[:, None] - wanted).abs().min(1).values <= found.bounds).all())


def test_single_precision_is_as_close_as_its_bounds_say() -> None:
    model, data = trained()
    wanted = values_of(dense_of(model, data))
    found = saltflat.compute_spectrum(model, data, k=5, smallest=0, dtype=torch.float32, density=False)
    for pair, value in zip(found.largest, wanted, strict=False):
        assert pair.converged
        assert abs(pair.value - value) <= 10 * pair.bound
    assert found.settings["dtype"] == "float32"


# Density.


def smoothed(values: Array, grid: Array, width: float) -> Array:
    each: Array = np.exp(-(((grid[:, None] - values) / width) ** 2) / 2) / (width * (2 * np.pi) ** 0.5)
    found: Array = each.mean(1)
    return found


def kolmogorov(one: Array, two: Array, grid: Array) -> float:
    """The largest difference of two cumulative distributions."""
    return float(np.abs(np.cumsum(one - two)).max() * (grid[1] - grid[0]))


@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
def test_the_density_is_the_dense_one_in_distribution(matrix: Matrix) -> None:
    model, data = trained()
    case = Case(model, [data], "cross_entropy", F.cross_entropy)
    wanted = values_of(dense_of(model, data) if matrix == "hessian" else gauss_newton(case))
    found = saltflat.compute_spectrum(model, data, k=5, matrix=matrix, draws=16)
    density = found.density()
    true = smoothed(wanted, density.grid, density.width)
    assert np.trapezoid(density.value, density.grid) == pytest.approx(1, abs=1e-3)
    assert kolmogorov(density.value, true, density.grid) < 0.02
    # Far from the outliers, which are exact, there is nothing left to chance.
    outer = density.grid > wanted[4] + 3 * density.width
    np.testing.assert_allclose(density.value[outer], true[outer], rtol=1e-4, atol=1e-6)
    assert abs(found.trace - wanted.sum()) <= 3 * found.trace_stderr


def test_with_all_eigenvalues_the_density_and_the_trace_are_exact() -> None:
    case = CASES["biased_mlp"]()
    wanted = values_of(dense("biased_mlp")[2])
    found = saltflat.compute_spectrum(case.model, case.batches, case.loss, k=len(wanted), draws=2)
    density = found.density()
    np.testing.assert_allclose(density.value, smoothed(wanted, density.grid, density.width), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(density.low, density.high)
    assert found.trace == pytest.approx(wanted.sum(), rel=1e-10)
    assert found.trace_stderr == 0


def block_of(values: Tensor, draws: int, seed: int, known: int = 3) -> Block:
    """A diagonal matrix whose ``known`` largest eigenvalues are found."""
    count = len(values)
    measures = compute_quadratures(
        lambda v: {"a": v["a"] * values},
        lambda number: drawing(count)(number + 1000 * seed),
        draws,
        30,
        {"a": torch.eye(count, dtype=torch.float64)[:known]},
        {"a": float(values.abs().max())},
        at_once=draws,
    )["a"]
    nodes, weights = (tuple(tuple(each[n].tolist()) for each in measures) for n in (0, 1))
    return Block("a", count, (), (), True, tuple(values[:known].tolist()), nodes, weights)


def test_the_band_covers_the_true_density_about_as_often_as_it_says() -> None:
    values = torch.cat([torch.tensor([10.0, 8.0, 5.0]), torch.randn(147, generator=torch.Generator().manual_seed(5))])
    values = values.double()
    grid = np.linspace(-2.5, 2.5, 21)
    true = smoothed(values.numpy(), grid, 0.3)
    inside, traces = [], []
    for seed in range(100):
        block = block_of(values, 8, seed)
        density = block.density(grid, 0.3)
        inside.append((density.low <= true) & (true <= density.high))
        traces.append(abs(block.trace - float(values.sum())) <= 1.96 * block.trace_stderr)
    assert 0.90 <= np.mean(inside) <= 0.98
    assert 0.88 <= np.mean(traces) <= 1


def test_probes_in_groups_are_the_same_probes() -> None:
    model, data = trained()
    many = saltflat.compute_spectrum(model, data, k=2, smallest=0, draws=3, steps=10)
    few = saltflat.compute_spectrum(model, data, k=2, smallest=0, draws=3, steps=10, memory=2 * 8 * 171 * 20)
    np.testing.assert_allclose(few.only_block.nodes, many.only_block.nodes, rtol=0, atol=1e-9)
    np.testing.assert_allclose(few.eigenvalues, many.eigenvalues, rtol=1e-9)


def test_steps_that_do_not_fit_in_memory_are_left_out_with_a_note() -> None:
    model, data = trained()
    found = saltflat.compute_spectrum(model, data, k=2, smallest=0, draws=2, steps=40, memory=2 * 8 * 171 * 20)
    assert {len(each) for each in found.only_block.nodes} == {12}
    assert "Only 12 steps of each probe fit in memory, not 40: the density is coarser." in found.notes


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    model, data = trained()
    one, two, other = (
        saltflat.compute_spectrum(model, data, k=2, draws=2, steps=8, seed=seed).only_block for seed in (3, 3, 4)
    )
    assert one == two
    assert one.nodes != other.nodes
    np.testing.assert_allclose(one.eigenvalues, other.eigenvalues, rtol=1e-8, atol=1e-8)


def test_a_network_without_curvature_has_a_spectrum_of_zeros() -> None:
    model = nn.Linear(4, 3).double()
    data = reals(5, 4), torch.zeros(5, dtype=torch.long)
    found = saltflat.compute_spectrum(model, data, lambda output, target: output.mean(), k=4, draws=2, steps=5)
    assert found.eigenvalues.tolist() == [0.0] * 9
    assert (found.trace, found.trace_stderr) == (0.0, 0.0)
    assert np.trapezoid(found.density().value, found.density().grid) == pytest.approx(1, abs=1e-3)
    assert "There is no curvature at all in network." in found.notes
    assert found.plot().axes


def test_one_parameter_has_one_eigenvalue() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    data = torch.full((2, 1), 3.0).double(), torch.zeros(2, 1).double()
    for options in ({}, {"per": "layer"}, {"matrix": "gauss_newton"}):
        found = saltflat.compute_spectrum(model, data, "mse", k=1, **options)  # type: ignore[arg-type]
        assert found.eigenvalues.tolist() == [pytest.approx(18)]
        assert found.trace == pytest.approx(18)


def test_splitting_the_data_changes_nothing() -> None:
    model, data = trained()
    batches = [(data[0][n : n + 30], data[1][n : n + 30]) for n in (0, 30, 60)]
    for matrix in ("hessian", "gauss_newton"):
        for per in ("network", "layer"):
            one, two = (
                saltflat.compute_spectrum(model, given, k=2, matrix=matrix, per=per, draws=2, steps=4)
                for given in (data, batches)
            )
            for name, block in one.items():
                np.testing.assert_allclose(block.eigenvalues, two[name].eigenvalues, rtol=1e-9, atol=1e-9)
                assert block.trace == pytest.approx(two[name].trace, rel=1e-9)


# Against another library.


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_curvlinops_finds_the_same_eigenvalues_and_a_density_within_the_band() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    from scipy.sparse.linalg import eigsh

    model, data = trained()
    parameters = [each.requires_grad_() for each in model.parameters()]
    operator = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [data])
    found = saltflat.compute_spectrum(model, data, k=5, draws=12, steps=40)
    theirs = np.sort(eigsh(operator.to_scipy(), k=5, which="LA", tol=1e-10, return_eigenvectors=False))[::-1]
    np.testing.assert_allclose(found.eigenvalues[:5], theirs, rtol=1e-8)

    torch.manual_seed(0)
    grid, density = curvlinops.lanczos_approximate_spectrum(operator, 40, num_repeats=12, margin=0.1)
    low, high = found.only_block.ends
    width = 1.2 * (high - low) / 2 * 2 / 39 / (8 * np.log(3)) ** 0.5  # of their Gaussians
    ours = found.density(grid.numpy(), width)
    assert kolmogorov(ours.value, density.numpy(), ours.grid) < 0.03


# What is refused.


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no eigenvalues": ({"k": 0}, OptionError, "k=0"),
    "a boolean": ({"k": True}, OptionError, "k=True"),
    "more eigenvalues than parameters": ({"k": 172}, OptionError, "k=172 with 171 parameters"),
    "more at both ends": ({"k": 168, "smallest": 4}, OptionError, "smallest=3"),
    "more than a layer has": ({"k": 71, "per": "layer"}, OptionError, "70 parameters in the largest layer"),
    "a negative number": ({"smallest": -1}, OptionError, "smallest=-1"),
    "one probe": ({"draws": 1}, OptionError, "draws=1"),
    "one step": ({"steps": 1}, OptionError, "steps=1"),
    "a matrix that does not exist": ({"matrix": "fisher"}, UnknownNameError, "hessian"),
    "no matrix": ({"matrix": None}, UnknownNameError, "gauss_newton"),
    "an arrangement that does not exist": ({"per": "unit"}, UnknownNameError, "layer"),
    "a density that is no choice": ({"density": 1}, OptionError, "density=1"),
    "a layer that does not exist": ({"layers": ["fc"]}, UnknownNameError, "fc"),
    "a layer without parameters": ({"layers": ["1"]}, ParameterError, "Expected a layer with parameters, but got '1'"),
    "no seed": ({"seed": -1}, OptionError, "seed=-1"),
    "no memory": ({"memory": "much"}, OptionError, "memory"),
    "no progress": ({"progress": 3}, OptionError, "progress"),
    "half precision": ({"dtype": torch.float16}, ModelError, "float16"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_and_nothing_is_changed(name: str) -> None:
    model, data = trained()
    options, kind, said = BAD[name]
    before = snapshot(model)
    with pytest.raises(kind, match=re.escape(said)) as caught:
        saltflat.compute_spectrum(model, data, **options)
    assert isinstance(caught.value, saltflat.SaltflatError)
    assert snapshot(model) == before


def test_memory_that_does_not_hold_the_vectors_is_refused_before_the_work() -> None:
    model = nn.Linear(200, 300)
    data = torch.randn(4, 200), torch.randint(300, (4,))
    with pytest.raises(OptionError, match=r"60,300 parameters.*memory='47MiB'"):
        saltflat.compute_spectrum(model, data, memory="1MiB")
    assert (
        saltflat.compute_spectrum(model, data, memory="47MiB", k=10, density=False, dtype=torch.float32).eigenvalues[0]
        > 0
    )


def test_models_without_second_derivatives_are_refused_with_a_way_out() -> None:
    case = CASES["embedding_bag"]()
    matrices: tuple[Matrix, ...] = ("hessian", "gauss_newton")
    for matrix in matrices:
        with pytest.raises(ModelError, match="matrix='gauss_newton' with per='layer'"):
            saltflat.compute_spectrum(case.model, case.batches, case.loss, k=2, matrix=matrix)
    found = saltflat.compute_spectrum(case.model, case.batches, case.loss, k=2, matrix="gauss_newton", per="layer")
    assert all(block.largest[0].value > 0 for block in found.values())


@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
def test_hidden_second_derivatives_are_refused(matrix: Matrix) -> None:
    case = cubed(CubeOnce)
    with pytest.raises(ModelError, match="once_differentiable"):
        saltflat.compute_spectrum(case.model, case.batches, case.loss, k=2, matrix=matrix)


def test_wrong_second_derivatives_are_refused() -> None:
    case = CASES["weight_norm_parametrization"]()
    for per in ("network", "layer"):
        with pytest.raises(ModelError, match="are wrong"):
            saltflat.compute_spectrum(case.model, case.batches, case.loss, k=2, per=per)


def test_overflow_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e10)
    with pytest.raises(NonFiniteError):
        saltflat.compute_spectrum(model, (torch.full((2, 2), 1e15), torch.zeros(2, 2)), "mse", k=1)


def test_the_model_comes_back_as_it_was() -> None:
    model, data = trained()
    model.train()
    before = snapshot(model)
    for matrix in ("hessian", "gauss_newton"):
        for per in ("network", "layer"):
            saltflat.compute_spectrum(model, data, k=2, matrix=matrix, per=per, draws=2, steps=3)
            assert snapshot(model) == before


# The result.


@pytest.fixture(scope="module")
def found() -> Spectrum:
    return saltflat.compute_spectrum(*trained(), k=3, smallest=2, draws=3, steps=12)


@pytest.fixture(scope="module")
def by_layer() -> Spectrum:
    return saltflat.compute_spectrum(*trained(), k=2, smallest=1, per="layer", draws=2, steps=5)


def test_a_spectrum_is_a_mapping_of_blocks(found: Spectrum, by_layer: Spectrum) -> None:
    assert list(found) == ["network"]
    assert found.only_block is found["network"]
    assert list(by_layer) == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    with pytest.raises(OptionError, match=r"spectrum\['0.weight'\]"):
        _ = by_layer.eigenvalues
    with pytest.raises(UnknownNameError, match=r"Try .2\.weight."):
        _ = by_layer["2.weights"]


def test_it_says_what_was_found(found: Spectrum, by_layer: Spectrum) -> None:
    text = " ".join(str(found).split())
    assert f"largest 1 {found.largest[0].value:.6g}" in text
    assert f"smallest 1 {found.smallest[0].value:.6g}" in text
    assert "Hessian | 80 examples" in text
    assert "3 random probes" in text
    assert "Trace: " in text
    layers = str(by_layer)
    assert all(name in layers for name in by_layer)
    for each in (found, by_layer):
        assert "<table>" in each._repr_html_()
        assert ".plot() draws it" in repr(each)


def test_a_spectrum_is_the_same_after_it_was_saved(found: Spectrum, by_layer: Spectrum, tmp_path: Path) -> None:
    for each in (found, by_layer):
        path = each.save(tmp_path / "spectrum.json")
        again = Spectrum.load(path)
        assert again == each
        assert again.blocks == each.blocks
        assert str(again) == str(each)
    without = saltflat.compute_spectrum(*trained(), k=1, smallest=0, density=False)
    assert Spectrum.load(without.save(tmp_path / "spectrum.json")) == without
    assert np.isnan(without.trace)
    with pytest.raises(OptionError, match="density=True"):
        without.density()


TAMPERED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a field is missing": lambda d: d.pop("notes"),
    "a field too many": lambda d: d.update(color="red"),
    "no block": lambda d: d.update(blocks=[{}]),
    "an eigenvalue that is a text": lambda d: d["blocks"][0]["largest"][0].update(value="1.0"),
    "a whole number for a float": lambda d: d["blocks"][0]["largest"][0].update(value=1),
    "no eigenvalues": lambda d: d["blocks"][0].update(largest=[]),
    "weights that do not sum to one": lambda d: d["blocks"][0]["weights"][0].__setitem__(0, 3.0),
    "nodes without weights": lambda d: d["blocks"][0]["weights"].pop(),
    "fewer parameters than eigenvalues": lambda d: d["blocks"][0].update(parameters=2),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_file_that_nobody_wrote_is_refused(found: Spectrum, name: str, tmp_path: Path) -> None:
    content = json.loads(json.dumps(found.to_dict()))
    TAMPERED[name](content)
    path = tmp_path / "spectrum.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ReportError, match="cannot be understood"):
        Spectrum.load(path)


def test_other_files_are_told_apart(found: Spectrum, tmp_path: Path) -> None:
    path = found.save(tmp_path / "spectrum.json")
    with pytest.raises(ReportError, match="not a report but a spectrum"):
        saltflat.Report.load(path)


def test_grids_and_widths_that_mean_nothing_are_refused(found: Spectrum) -> None:
    for grid in ("here", [[1.0]], [], [float("nan")]):
        with pytest.raises(OptionError, match="grid"):
            found.density(grid)
    for width in (0, -1.0, float("inf"), "wide"):
        with pytest.raises(OptionError, match="width"):
            found.density(width=width)  # type: ignore[arg-type]


def test_the_picture_shows_density_band_and_eigenvalues(found: Spectrum, by_layer: Spectrum, tmp_path: Path) -> None:
    figure: Any = found.plot()
    (axis,) = figure.axes
    assert axis.get_yscale() == "log"
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    smoothed_by = f"density, smoothed by {found.density().width:.2g}"
    assert labels == ["95 % interval", smoothed_by, "3 largest", "2 smallest"]
    marks = axis.lines[1].get_xdata()
    assert list(marks) == [pair.value for pair in found.largest]
    figure.savefig(tmp_path / "one.png")
    layers = by_layer.plot(width=0.01)
    assert [each.get_title() for each in layers.axes] == list(by_layer)
    layers.savefig(tmp_path / "layers.png")


def test_progress_is_told_with_a_total_for_the_density() -> None:
    told: list[tuple[str, int, int | None]] = []
    saltflat.compute_spectrum(*trained(), k=2, draws=2, steps=6, progress=lambda *each: told.append(each))
    steps = {step for step, _, _ in told}
    assert steps == {"Eigenvalues of the network", "Density of the eigenvalues"}
    assert told[-1] == ("Density of the eigenvalues", 6, 6)


def test_many_vectors_share_one_pass_over_the_data() -> None:
    model, data = trained()
    passes: list[Mapping[str, Any]] = []
    model.register_forward_hook(lambda module, args, out: passes.append({}))
    saltflat.compute_spectrum(model, data, k=1, smallest=0, draws=2, steps=10)
    two = len(passes)
    passes.clear()
    saltflat.compute_spectrum(model, data, k=1, smallest=0, draws=8, steps=10)
    assert len(passes) == two


def test_the_code_of_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent.parent / "docs" / "spectrum.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    known: dict[str, Any] = {}
    exec(block, known)
    assert eval("Spectrum.load('spectrum.json') == found", known)
    assert (tmp_path / "spectrum.png").stat().st_size > 0


def test_the_loss_is_that_of_the_data() -> None:
    case = problem(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), reals(7, 3), torch.randint(2, (7,)))
    found = saltflat.compute_spectrum(case.model, case.batches, case.loss, k=1, density=False)
    assert found.loss == pytest.approx(float(oracle.loss(case)))
    assert found.examples == 7
