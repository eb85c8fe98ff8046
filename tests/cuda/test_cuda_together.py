"""Training together on a GPU; skipped where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from training_cases import SHRUNK, assert_same, examples

from saltflat.studies.recipe import Recipe
from saltflat.studies.training import batched_epoch
from saltflat.studies.training.cuda_graph import WORTH_IT, CudaGraphSteps
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


@pytest.mark.parametrize("way", ["auto", "grouped", "each", "banded"])
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


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_steps_that_are_recorded_and_played_are_as_alone(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CudaGraphSteps] = []

    class Watched(CudaGraphSteps):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            made.append(self)

    monkeypatch.setattr(batched_epoch, "CudaGraphSteps", Watched)
    many = examples((2, 16, 16), train=4 * WORTH_IT + 3)
    base = Recipe(
        network=name, architecture=SHRUNK[name], optimizer=optimizer, lr=0.003, momentum=0.9, nesterov=True,
        batch_size=4, epochs=4, dtype="float64", schedule="inverse", decay=0.01,
    )  # fmt: skip
    few = [replace(base, seed=seed, weight_decay=0.01 * seed, epochs=2 + seed) for seed in range(3)]
    found = train_together(few, many, device="cuda")
    assert len(made) == 3  # anew whenever a network has left the stack
    assert_same(found, [train_alone(recipe, many, device="cuda") for recipe in few])
