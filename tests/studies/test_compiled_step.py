"""A compiled step is the step itself, and where it is not it is not used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import SHRUNK, examples

from saltflat.studies.recipe import Recipe
from saltflat.studies.training.batched_epoch import BatchTrainer
from saltflat.studies.training.cuda_graph import TOLERANCES, CompiledStep, StepInputs
from saltflat.studies.training.network_batch import NetworkBatch

IMAGES = examples((2, 16, 16)).to(torch.device("cpu"), torch.float64)
SETTINGS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.4, "momentum": 0.9, "decoupled_weight_decay": 0.1},
    "augmentation": {"augment": "flip_crop", "crop": 2, "optimizer": "adam", "lr": 0.01},
    "sam": {"sam": 0.1, "dropout": 0.2, "label_smoothing": 0.1},
}


def make_trainer(name: str, **settings: Any) -> tuple[BatchTrainer, StepInputs]:
    """Return the trainer of three networks, and the inputs of their first step."""
    base = Recipe(network=name, architecture=SHRUNK[name], batch_size=8, epochs=3, dtype="float64")
    recipes = [replace(base, **settings, seed=seed, weight_decay=0.01 * seed) for seed in range(3)]
    trainer = BatchTrainer(recipes, IMAGES, NetworkBatch([0, 1, 2]), "auto")
    return trainer, trainer._make_epoch_inputs().select_step(0, 8)


def make_step(trainer: BatchTrainer, backend: str = "aot_eager") -> CompiledStep:
    fused = None if trainer.dropout is None else trainer.dropout.prepare_compiling()
    traced = partial(trainer._take_step, dropout=fused)
    return CompiledStep(trainer._take_step, traced, trainer.batch.collect_tensors(), "float64", backend)


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20"])
def test_a_compiled_step_changes_what_the_step_itself_changes(name: str, what: str) -> None:
    trainer, step = make_trainer(name, **SETTINGS[what])
    other, _ = make_trainer(name, **SETTINGS[what])
    compiled = make_step(trainer)
    for _ in range(2):
        torch.testing.assert_close(compiled(step), other._run_step(step), rtol=1e-12, atol=0)
    assert compiled.problem is None
    for name, each in trainer.batch.collect_tensors().items():
        torch.testing.assert_close(each, other.batch.collect_tensors()[name], rtol=1e-10, atol=1e-12)


def test_a_compiled_step_that_differs_is_not_used() -> None:
    trainer, step = make_trainer("mlp")
    before = trainer._rows.clone()

    def take_other_step(tensors: Mapping[str, Tensor], step: StepInputs) -> Tensor:
        losses = trainer._take_step(tensors, step)
        with torch.no_grad():
            tensors["rows"].lerp_(before, 1e-6)
        return losses

    compiled = CompiledStep(
        trainer._take_step, take_other_step, trainer.batch.collect_tensors(), "float64", "aot_eager"
    )
    compiled(step)
    assert "rows differ by 1.0e-06 of a step" in str(compiled.problem)
    other, _ = make_trainer("mlp")
    other._run_step(step)
    assert torch.equal(trainer._rows, other._rows)


def test_a_step_that_cannot_be_compiled_runs_as_it_is() -> None:
    trainer, step = make_trainer("mlp")
    compiled = make_step(trainer, backend="no such compiler")
    other, _ = make_trainer("mlp")
    torch.testing.assert_close(compiled(step), other._run_step(step), rtol=0, atol=0)
    assert "no such compiler" in str(compiled.problem)
    assert torch.equal(trainer._rows, other._rows)


def test_every_precision_of_a_recipe_has_a_tolerance() -> None:
    assert set(TOLERANCES) == {"float64", "float32", "tf32", "bf16"}


def test_short_trainings_and_those_with_targets_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = "saltflat.studies.training.batched_epoch.WORTH_COMPILING"
    assert not make_trainer("mlp")[0]._is_worth_compiling()
    monkeypatch.setattr(worth, 1)
    assert make_trainer("mlp")[0]._is_worth_compiling()
    assert not make_trainer("mlp", target_loss=0.1)[0]._is_worth_compiling()
    assert not make_trainer("mlp", fisher_penalty=1.0, fisher_parts=2)[0]._is_worth_compiling()
