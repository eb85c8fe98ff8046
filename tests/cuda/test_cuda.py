"""The same numbers and promises on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from architectures import NETWORKS
from cases import CASES
from chains import CHAINS
from torch import nn
from torch.utils._pytree import tree_map

import saltflat
from saltflat.symmetry import equal_up_to_rescaling

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # Said by the first backward pass of a process, in a thread of its own.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

NAMES = ["curvature_diagonal", "curvature_trace", "gradient_second_moment"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_gpu_gives_what_a_cpu_gives(name: str) -> None:
    case = CASES[name]()
    here = saltflat.compute_statistics(case.model, case.batches, names=NAMES, loss=case.loss)
    batches = tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, case.batches)
    there = saltflat.compute_statistics(case.model.cuda(), batches, names=NAMES, loss=case.loss)
    for statistic in NAMES:
        largest = max(float(value.abs().max()) for value in here[statistic].values())
        for parameter, value in here[statistic].items():
            # torch's weight_norm works in less than float64 on a GPU.
            tolerance = 1e-6 if name == "weight_norm_parametrization" else 1e-10
            floor = tolerance * max(float(value.abs().max()), 1e-15 * largest)
            torch.testing.assert_close(there[statistic][parameter].cpu(), value, rtol=tolerance, atol=floor)


def test_random_states_and_the_memory_limit_hold_on_a_gpu() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 784, 10)
    ).cuda()
    x, y = torch.randn(512, 3, 32, 32, device="cuda"), torch.randint(10, (512,), device="cuda")
    state = torch.cuda.get_rng_state()
    for memory in ("256MiB", "1GiB"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = saltflat.compute_statistics(net, (x, y), names="curvature_diagonal", memory=memory)
        results = sum(value.numel() * 8 for value in found["curvature_diagonal"].values())
        extra = torch.cuda.max_memory_allocated() - before - 2 * results
        assert extra <= int(found.settings["memory"])
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_data_on_the_cpu_is_named() -> None:
    with pytest.raises(saltflat.SaltflatError, match="cuda"):
        saltflat.compute_statistics(
            nn.Linear(2, 2).cuda(), (torch.randn(3, 2), torch.tensor([0, 1, 0])), names="curvature_trace"
        )


@pytest.mark.parametrize(
    "name", [*CHAINS, "residual_with_batch_norm", "multihead_attention", "tied_embedding_and_output"]
)
def test_measures_on_a_gpu_are_those_on_a_cpu(name: str) -> None:
    case = {**CASES, **CHAINS}[name]()
    here = saltflat.measure(case.model, case.batches, case.loss, "all")
    batches = tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, case.batches)
    there = saltflat.measure(case.model.cuda(), batches, case.loss, "all")
    assert list(there) == list(here)
    for measure, reading in here.items():
        # A determinant that is zero to rounding is rounding.
        if reading.details.get("floored_eigenvalues"):
            continue
        assert there[measure].value == pytest.approx(reading.value, rel=1e-7, nan_ok=True), measure
    assert there.certificate is not None
    assert here.certificate is not None
    assert there.certificate["holds"] == here.certificate["holds"]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_rescalings_found_on_a_gpu_are_those_found_on_a_cpu(name: str) -> None:
    case = NETWORKS[name]()
    x, _ = case.batches[0]
    assert isinstance(x, torch.Tensor)
    here = saltflat.find_symmetries(case.model, x)
    model = case.model.cuda()
    there = saltflat.find_symmetries(model, x.cuda())
    assert there.scales == here.scales
    moving = there.find_movable_entries()
    for member, moves in here.find_movable_entries().items():
        assert (moving[member] == moves).all(), member
    other = saltflat.rescale(model, x.cuda(), seed=1)
    assert equal_up_to_rescaling(model, other, x.cuda())
    batches = tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, case.batches)
    names = ["minimum_sharpness", "minimum_unit_sharpness"]
    one, two = (saltflat.measure(m, batches, case.loss, names, certificate=False) for m in (model, other))
    assert two["minimum_unit_sharpness"].value == pytest.approx(one["minimum_unit_sharpness"].value, rel=1e-6)
    folded = saltflat.fold(model, x.cuda())
    with torch.no_grad():
        torch.testing.assert_close(folded.eval()(x.cuda()), model.eval()(x.cuda()), rtol=1e-9, atol=1e-9)
