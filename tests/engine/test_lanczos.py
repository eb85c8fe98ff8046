"""The largest eigenvalue of every block, all found together."""

from __future__ import annotations

from collections.abc import Mapping

import measure_oracle as dense
import pytest
import torch
from cases import CASES
from chains import CHAINS
from curvature_cases import matrix_with
from torch import Tensor, nn

import saltflat
from saltflat.engine import lanczos
from saltflat.engine.lanczos import find_top_eigenvalues

ALL = {**CHAINS, **CASES}


@pytest.mark.parametrize(
    "name",
    [
        *CHAINS,
        "residual_with_batch_norm",
        "multihead_attention",
        "tied_embedding_and_output",
        "transposed_convolution_1d",
    ],
)
def test_eigenvalues_are_those_of_the_dense_blocks(name: str) -> None:
    case = ALL[name]()
    found = saltflat.compute_eigenvalues(case.model, case.batches, case.loss)
    assert set(found) == set(dense.weights(case))
    for layer, top in found.items():
        block = dense.block(case, layer)
        assert top.value == pytest.approx(dense.top(block), rel=1e-8, abs=1e-14)
        assert top.converged
        assert float(top.vector.norm()) == pytest.approx(1)
        image = torch.from_numpy(block) @ top.vector.flatten()
        off = float((image - top.value * top.vector.flatten()).norm())
        assert off <= 1.01 * top.residual * abs(top.value) + 1e-14


SPECTRA = {
    "spread": torch.linspace(0, 1, 200, dtype=torch.float64),
    "close at the top": torch.cat([torch.linspace(0, 0.9, 198, dtype=torch.float64), torch.tensor([0.9999, 1.0])]),
    "largest twice": torch.cat([torch.linspace(0, 0.9, 198, dtype=torch.float64), torch.tensor([1.0, 1.0])]),
    "large negative ones": torch.linspace(-100, 1, 200, dtype=torch.float64),
    "all negative": torch.linspace(-3, -1, 200, dtype=torch.float64),
    "rank one": torch.cat([torch.zeros(199, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]),
    "zero": torch.zeros(50, dtype=torch.float64),
    "over many decades": torch.logspace(-12, 3, 120, dtype=torch.float64),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_algebraic_eigenvalue_is_found_through_restarts(name: str) -> None:
    values = SPECTRA[name]
    matrix = matrix_with(values)
    starts = {"a": torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    top = find_top_eigenvalues(lambda v: {"a": matrix @ v["a"]}, starts)["a"]
    scale = float(values.abs().max())
    assert top.converged
    assert abs(top.value - float(values.max())) <= 1e-8 * scale
    assert abs(top.value - float(values.max())) <= (top.residual + 1e-12) * scale


def test_the_process_is_restarted_when_its_basis_is_full() -> None:
    matrix = matrix_with(SPECTRA["close at the top"])
    top = find_top_eigenvalues(lambda v: {"a": matrix @ v["a"]}, {"a": torch.ones(200, dtype=torch.float64)})["a"]
    assert top.steps > lanczos.BASIS


def test_too_few_steps_are_said() -> None:
    matrix = matrix_with(SPECTRA["spread"])
    top = find_top_eigenvalues(lambda v: {"a": matrix @ v["a"]}, {"a": torch.ones(200, dtype=torch.float64)}, steps=3)[
        "a"
    ]
    assert not top.converged
    assert top.steps == 3
    assert top.value < 1.0


def test_many_blocks_take_as_many_products_as_the_slowest() -> None:
    blocks = {name: matrix_with(values) for name, values in SPECTRA.items()}
    starts = {
        name: torch.randn(len(b), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for name, b in blocks.items()
    }
    calls: list[int] = []

    def product(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        calls.append(len(vectors))
        return {name: blocks[name] @ v for name, v in vectors.items()}

    together = find_top_eigenvalues(product, starts)
    assert len(calls) == max(top.steps for top in together.values())
    for name, start in starts.items():
        alone = find_top_eigenvalues(product, {name: start})[name]
        assert alone.steps == together[name].steps
        assert alone.value == pytest.approx(together[name].value, rel=1e-12, abs=1e-14)


def test_an_earlier_result_makes_the_next_quick() -> None:
    case = CHAINS["convolutions_with_biases"]()
    first = saltflat.compute_eigenvalues(case.model, case.batches)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.mul_(1.0001)
    cold = saltflat.compute_eigenvalues(case.model, case.batches)
    warm = saltflat.compute_eigenvalues(case.model, case.batches, start=first)
    assert max(top.steps for top in warm.values()) < max(top.steps for top in cold.values())
    for name, top in warm.items():
        assert top.value == pytest.approx(cold[name].value, rel=1e-8)


def test_a_result_of_another_network_is_refused() -> None:
    case = CHAINS["mlp_with_biases"]()
    first = saltflat.compute_eigenvalues(case.model, case.batches)
    other = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    with pytest.raises(saltflat.SaltflatError, match="same architecture"):
        saltflat.compute_eigenvalues(other, case.batches, start=first)


def test_a_small_basis_finds_the_same() -> None:
    """What memory allows: six vectors instead of twenty-four."""
    matrix = matrix_with(SPECTRA["spread"])
    start = {"a": torch.ones(200, dtype=torch.float64)}
    few, many = (find_top_eigenvalues(lambda v: {"a": matrix @ v["a"]}, start, basis=size)["a"] for size in (6, 24))
    assert few.converged
    assert few.value == pytest.approx(many.value, rel=1e-8)
    case = CHAINS["convolutions_with_biases"]()
    tight = saltflat.compute_eigenvalues(case.model, case.batches, memory=2000)
    for name, top in saltflat.compute_eigenvalues(case.model, case.batches).items():
        assert tight[name].value == pytest.approx(top.value, rel=1e-8)
