"""A training that is killed goes on from its checkpoint and ends as if nothing had happened, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import SHRUNK, examples

from saltflat.errors import ReportError
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import TrainedNetwork
from saltflat.studies.store.checkpoint import Checkpoint, describe_training, read_matching_checkpoint, write_checkpoint
from saltflat.studies.training import train_batched, train_one
from saltflat.studies.training.build import build_network
from saltflat.studies.training.vmapped_model import VmappedModel

DATA = examples()
IMAGES = examples((2, 16, 16))
BASE = Recipe(architecture={"widths": (7, 5)}, lr=0.1, batch_size=8, epochs=5)
RECIPES = [
    replace(BASE, seed=0, momentum=0.9, dropout=0.3, schedule="inverse"),
    replace(BASE, seed=1, epochs=2, label_noise=0.4),
    replace(BASE, seed=2, lr=1e30, epochs=7),
    replace(BASE, seed=3, optimizer="adam", lr=0.01, epochs=3),
    replace(BASE, seed=4, lr=0.3, epochs=40, target_loss=0.5, weight_decay=0.01),
]
ADAM = replace(BASE, optimizer="adam", lr=0.01, weight_decay=0.01, dropout=0.2)
RESIDUAL = Recipe(
    network="resnet20",
    architecture=SHRUNK["resnet20"],
    batch_size=10,
    epochs=3,
    momentum=0.9,
    augment="flip_crop",
    crop=1,
)


class KilledError(Exception):
    """Stands for the end of the process."""


def killed_after(epochs: int) -> Callable[[int, int], None]:
    def tell(done: int, most: int) -> None:
        nonlocal epochs
        epochs -= 1
        if epochs == 0:
            raise KilledError

    return tell


def assert_equal(found: TrainedNetwork, wanted: TrainedNetwork) -> None:
    assert list(found.weights) == list(wanted.weights)
    for name, value in wanted.weights.items():
        assert torch.equal(found.weights[name], value) or not value.isfinite().all()
    # Not a number is not equal to itself, but prints the same.
    assert repr(found.outcome) == repr(wanted.outcome)


def interrupted(train: Callable[..., Any], path: Path, often: int) -> Any:
    """Killed after every so many epochs until it is through."""
    for _ in range(100):
        try:
            return train(checkpoint=path, every=0.0, tell=killed_after(often))
        except KilledError:
            assert [each.name for each in path.parent.iterdir()] in ([], [path.name])
    raise AssertionError("never through")


# After one epoch the checkpoint of that epoch is not written yet: it would never get on.
@pytest.mark.parametrize("often", [2, 3, 5])
def test_training_together_goes_on_bit_for_bit(tmp_path: Path, often: int) -> None:
    wanted = train_batched.train_together(RECIPES, DATA)
    found = interrupted(lambda **options: train_batched.train_together(RECIPES, DATA, **options), tmp_path / "c", often)
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)
    assert [each.outcome.status for each in wanted] == ["done", "done", "diverged", "done", "done"]


def test_it_may_be_killed_after_any_epoch(tmp_path: Path) -> None:
    wanted = train_batched.train_together(RECIPES, DATA)
    for moment in range(1, 100):
        path = tmp_path / str(moment)
        try:
            train_batched.train_together(RECIPES, DATA, checkpoint=path, every=0.0, tell=killed_after(moment))
        except KilledError:
            found = train_batched.train_together(RECIPES, DATA, checkpoint=path)
            for one, other in zip(found, wanted, strict=True):
                assert_equal(one, other)
        else:
            break
    # Two stacks: one trains for 3 epochs, the other for as long as its last network.
    assert moment - 1 == 3 + max(each.outcome.epochs for each in wanted)


def test_batch_norm_and_augmentation_go_on_bit_for_bit(tmp_path: Path) -> None:
    recipes = [replace(RESIDUAL, seed=seed) for seed in range(2)]
    wanted = train_batched.train_together(recipes, IMAGES)
    found = interrupted(lambda **options: train_batched.train_together(recipes, IMAGES, **options), tmp_path / "c", 2)
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[4], ADAM])
def test_training_alone_goes_on_bit_for_bit(tmp_path: Path, recipe: Recipe) -> None:
    wanted = train_one.train_alone(recipe, DATA)
    found = interrupted(lambda **options: train_one.train_alone(recipe, DATA, **options), tmp_path / "c", 2)
    assert_equal(found, wanted)


def test_networks_that_cannot_be_stacked_go_on(tmp_path: Path) -> None:
    recipes = [replace(BASE, network="training_cases:noisy", architecture={}, seed=seed) for seed in range(3)]
    wanted = train_batched.train_together(recipes, DATA)
    found = interrupted(lambda **options: train_batched.train_together(recipes, DATA, **options), tmp_path / "c", 2)
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)


def test_a_finished_training_is_read_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    wanted = train_batched.train_together(RECIPES, DATA, checkpoint=path)
    single = train_one.train_alone(BASE, DATA, checkpoint=tmp_path / "d")

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(train_batched, "BatchTrainer", never)
    monkeypatch.setattr(train_one._TrainingSteps, "train_epoch", never)
    for one, other in zip(train_batched.train_together(RECIPES, DATA, checkpoint=path), wanted, strict=True):
        assert_equal(one, other)
        assert one.seconds == other.seconds
    assert_equal(train_one.train_alone(BASE, DATA, checkpoint=tmp_path / "d"), single)


def test_a_checkpoint_of_an_earlier_version_with_other_rows_is_resumed(tmp_path: Path) -> None:
    """Parameters once followed each other closely in a row."""
    recipes = [replace(BASE, seed=seed, momentum=0.9) for seed in range(2)]
    wanted = train_batched.train_together(recipes, DATA)
    path, states = tmp_path / "c", []

    def interrupt(done: int, most: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_batched.train_together(recipes, DATA, checkpoint=path, every=0.0, tell=interrupt)
    who = describe_training(recipes, DATA, together=True)
    standing = read_matching_checkpoint(path, who)
    assert standing is not None
    model = VmappedModel(build_network(BASE, DATA.shape, DATA.classes), DATA.train_inputs[0])
    tensors = dict(standing.tensors)
    for name in ("stack/0/rows", "stack/0/memory/velocity"):
        states.append(tensors[name])
        tensors[name] = torch.cat([each.flatten(1) for each in model.split_rows(tensors[name]).values()], dim=1)
        assert tensors[name].shape[1] < states[-1].shape[1]
    write_checkpoint(path, who, Checkpoint(standing.facts, tensors))
    epochs: list[int] = []
    found = train_batched.train_together(recipes, DATA, checkpoint=path, tell=lambda done, most: epochs.append(done))
    assert epochs[0] == 2
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)


def test_a_checkpoint_of_another_training_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "c"
    train_batched.train_together(RECIPES, DATA, checkpoint=path)
    others = [replace(RECIPES[0], lr=0.2), *RECIPES[1:]]
    assert_equal(
        train_batched.train_together(others, DATA, checkpoint=path)[0], train_batched.train_together(others, DATA)[0]
    )
    data = examples(seed=1)
    assert_equal(
        train_batched.train_together(others, data, checkpoint=path)[0], train_batched.train_together(others, data)[0]
    )
    assert_equal(train_one.train_alone(BASE, DATA, checkpoint=path), train_one.train_alone(BASE, DATA))


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "flipped", "a wrong number"])
def test_a_damaged_checkpoint_is_not_used(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    with pytest.raises(KilledError):
        train_batched.train_together(RECIPES, DATA, checkpoint=path, every=0.0, tell=killed_after(3))
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "noise": b"\x13" * 200,
            "empty": b"",
            "a wrong number": whole[:-5] + bytes([whole[-5] ^ 64]) + whole[-4:],
            "flipped": whole[:40] + bytes([whole[40] ^ 255]) + whole[41:],
        }[damage]
    )
    for one, other in zip(
        train_batched.train_together(RECIPES, DATA, checkpoint=path),
        train_batched.train_together(RECIPES, DATA),
        strict=True,
    ):
        assert_equal(one, other)


def test_a_checkpoint_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"whose folder does not exist"):
        train_batched.train_together(RECIPES, DATA, checkpoint=tmp_path / "missing" / "c")
