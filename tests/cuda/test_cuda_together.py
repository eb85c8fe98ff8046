"""Training together on a GPU; skipped where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import SHRUNK, assert_same, examples

from saltflat.studies.recipe import Recipe
from saltflat.studies.training import batched_epoch
from saltflat.studies.training.cuda_graph import WORTH_IT, CompiledStep, CudaGraphSteps
from saltflat.studies.training.train_batched import train_together
from saltflat.studies.training.train_one import train_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

IMAGES = examples((2, 16, 16))


def recipes(name: str) -> list[Recipe]:
    base = Recipe(
        network=name, architecture=SHRUNK[name], lr=0.03, momentum=0.9, batch_size=12, epochs=2, dtype="float64",
        augment="flip_crop", crop=2,
    )  # fmt: skip
    return [
        replace(base, seed=seed, dropout=0.2 * seed, label_noise=0.2 * seed, weight_decay=0.01 * seed)
        for seed in range(3)
    ]


@pytest.mark.parametrize("way", ["auto", "grouped", "each", "banded", "separate"])
@pytest.mark.parametrize("name", SHRUNK)
def test_networks_trained_together_on_a_gpu_are_as_alone_there(name: str, way: str) -> None:
    found = train_together(recipes(name), IMAGES, device="cuda", way=way)
    assert_same(found, [train_alone(recipe, IMAGES, device="cuda") for recipe in recipes(name)])
    assert all(not value.is_cuda for each in found for value in each.weights.values())
    assert not any(each.outcome.notes for each in found)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20"])
def test_without_dropout_a_gpu_gives_what_a_cpu_gives(name: str) -> None:
    plain = [replace(recipe, dropout=0.0) for recipe in recipes(name)]
    assert_same(train_together(plain, IMAGES, device="cuda"), train_together(plain, IMAGES))


def test_a_stack_too_large_for_the_gpu_is_halved() -> None:
    # Rows, velocity, gradient, copies for going back: a network of 17 million weights takes several times 67 MB.
    wide = Recipe(architecture={"widths": (4096, 4096)}, lr=0.001, momentum=0.9, batch_size=8, epochs=1)
    few = [replace(wide, seed=seed) for seed in range(2)]
    room = 14 * 4 * 4096**2  # seven numbers for each weight of two networks
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = train_together([*few, *(replace(wide, seed=seed) for seed in range(2, 8))], IMAGES, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all("memory did not hold" in each.outcome.notes[0] for each in found)
    assert_same(found[:2], train_together(few, IMAGES, device="cuda"), tolerance=1e-3)


FEW = 8  # steps in an epoch
# What a captured step may have to do, in settings that differ between networks.
STEPS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "dropout": {"dropout": 0.3},
    "augmentation": {"augment": "flip_crop", "crop": 2},
    "smoothing": {"label_smoothing": 0.1, "warmup": 0.5, "decoupled_weight_decay": 0.1},
    "subsets": {"train_subset": "random", "train_size": 4 * FEW + 1},
    "sam": {"sam": 0.1, "dropout": 0.2, "augment": "flip"},
    "asam": {"asam": 0.5, "dropout": 0.2},
    "gradient norm": {"gradient_norm": 0.1, "augment": "crop", "crop": 1},
    "Fisher penalty": {
        "fisher_penalty": 10.0, "fisher_parts": 2, "fisher_start_epoch": 1, "fisher_clip": 1.0, "dropout": 0.2,
        "augment": "flip",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"), [("mlp", "auto"), ("lenet5", "auto"), ("resnet20", "auto"), ("resnet20", "separate")]
)
@pytest.mark.parametrize("what", STEPS)
def test_steps_that_are_recorded_and_played_are_as_alone(
    name: str, way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CudaGraphSteps] = []

    class Watched(CudaGraphSteps):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            made.append(self)

    monkeypatch.setattr(batched_epoch, "CudaGraphSteps", Watched)
    monkeypatch.setattr(batched_epoch, "AT_ONCE", 3)
    monkeypatch.setattr(batched_epoch, "WORTH_IT", FEW)
    many = examples((2, 16, 16), train=4 * FEW + 3)
    base = Recipe(
        network=name, architecture=SHRUNK[name], lr=0.003, momentum=0.9, nesterov=True, batch_size=4, epochs=4,
        dtype="float64", schedule="inverse", decay=0.01,
    )  # fmt: skip
    few = [replace(base, **STEPS[what], seed=seed, weight_decay=0.01 * seed, epochs=2 + seed) for seed in range(3)]
    found = train_together(few, many, device="cuda", way=way)
    # Anew whenever a network has left the stack, and when the penalty starts.
    assert len(made) == (4 if what == "Fisher penalty" else 3)
    assert not any(each.outcome.notes for each in found)
    assert_same(found, [train_alone(recipe, many, device="cuda") for recipe in few])
    monkeypatch.setattr(batched_epoch, "WORTH_IT", 10**9)
    assert_same(train_together(few, many, device="cuda", way=way), found)


def test_a_gpu_draws_the_dropout_and_augmentation_of_a_cpu() -> None:
    few = recipes("lenet5")
    assert_same(train_together(few, IMAGES, device="cuda"), train_together(few, IMAGES))


@pytest.mark.parametrize("name", ["lenet5", "resnet20"])
@pytest.mark.parametrize("settings", [{}, {"sam": 0.05}, {"fisher_penalty": 1.0, "fisher_parts": 2}])
def test_bfloat16_trains_about_as_well_as_float32(name: str, settings: dict[str, Any]) -> None:
    many = examples((2, 16, 16), train=4 * WORTH_IT + 3)
    base = Recipe(network=name, lr=0.01, momentum=0.9, batch_size=4, epochs=2, augment="flip", **settings)
    fine, coarse = (train_together([replace(base, dtype=each)], many, device="cuda")[0] for each in ("float32", "bf16"))
    assert not coarse.outcome.notes
    assert coarse.weights["0.weight"].dtype is torch.float32
    # Without BatchNorm, all passes of the Fisher penalty are over parts, which stay in float32.
    unchanged = name == "lenet5" and "fisher_penalty" in settings
    assert (fine.outcome.train_loss == coarse.outcome.train_loss) == unchanged
    assert coarse.outcome.train_loss == pytest.approx(fine.outcome.train_loss, rel=0.5, abs=0.05)


class Synchronizing(nn.Module):
    """Reads a number from the GPU in every pass, which no CUDA graph can hold."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(channels, 3, 3), nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x).relu().mean((2, 3))
        found: Tensor = self.last(x)
        return found if float(found.detach().sum()) < 1e9 else 2 * found


def synchronizing(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Synchronizing(shape[0], classes)


def test_a_network_that_no_graph_can_hold_is_trained_step_by_step() -> None:
    many = examples((2, 16, 16), train=4 * WORTH_IT + 3)
    recipe = Recipe(network="test_cuda_together:synchronizing", lr=0.01, batch_size=4, epochs=2, dtype="float64")
    (found,) = train_together([recipe], many, device="cuda", way="separate")
    assert "CUDA graph could not capture" in found.outcome.notes[0]
    assert_same([found], [train_alone(recipe, many, device="cuda")])


@pytest.mark.parametrize("what", ["dropout", "augmentation", "adamw", "sam"])
@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_compiled_steps_are_as_alone(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CompiledStep] = []

    class Watched(CompiledStep):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            made.append(self)

    monkeypatch.setattr(batched_epoch, "CompiledStep", Watched)
    monkeypatch.setattr(batched_epoch, "WORTH_IT", 1)
    monkeypatch.setattr(batched_epoch, "WORTH_COMPILING", FEW)
    many = examples((2, 16, 16), train=4 * FEW + 3)
    base = Recipe(
        network=name, architecture=SHRUNK[name], lr=0.003, momentum=0.9, batch_size=4, epochs=2, dtype="float64"
    )
    few = [replace(base, **STEPS[what], seed=seed, weight_decay=0.01 * seed) for seed in range(3)]
    found = train_together(few, many, device="cuda")
    assert [each.problem for each in made] == [None]
    assert_same(found, [train_alone(recipe, many, device="cuda") for recipe in few])
