"""Networks trained together give the numbers of networks trained alone."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import SHRUNK, assert_same, examples

from saltflat.errors import UnknownNameError
from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.training import batched_epoch, separate_models, train_batched
from saltflat.studies.training.train_batched import compute_group_key, group_runs, train_together
from saltflat.studies.training.train_one import train_alone
from saltflat.studies.training.vmapped_model import VmappedModel

DATA = examples()
IMAGES = examples((2, 16, 16))
BASE = Recipe(architecture={"widths": (7, 5)}, lr=0.1, batch_size=8, epochs=3, dtype="float64")
# Of the networks with convolutions, every way of doing them; the others have none.
WAYS = [
    (name, way)
    for name in SHRUNK
    for way in (("auto",) if "mlp" in name else ("grouped", "each", "banded", "separate"))
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_every_network_is_trained_as_alone(name: str, way: str) -> None:
    recipes = [
        Recipe(
            network=name, architecture=SHRUNK[name], seed=seed, lr=0.03 * (seed + 1), momentum=0.9,
            weight_decay=1e-2 * seed, dropout=0.2 * seed, label_noise=0.2 * seed, batch_size=12, epochs=2,
            augment="flip_crop", crop=2, dtype="float64", init="default" if seed else "xavier_normal",
        )
        for seed in range(3)
    ]  # fmt: skip
    found = train_together(recipes, IMAGES, way=way)
    assert_same(found, [train_alone(recipe, IMAGES) for recipe in recipes])
    assert not any(each.outcome.notes for each in found)


@pytest.mark.parametrize("name", ["lenet5", "resnet20"])
def test_tensors_at_addresses_that_a_gpu_cannot_read_are_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def align_on_a_cpu(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.data_ptr() % 128 else tensor

    monkeypatch.setattr(separate_models, "_align", align_on_a_cpu)
    recipes = [
        Recipe(network=name, architecture=SHRUNK[name], seed=seed, lr=0.03, dropout=0.2 * seed, batch_size=12, epochs=2,
               dtype="float64")
        for seed in range(3)
    ]  # fmt: skip
    assert_same(train_together(recipes, IMAGES, way="separate"), [train_alone(recipe, IMAGES) for recipe in recipes])


# Settings that differ from network to network within one batch.
VARIED: dict[str, list[dict[str, Any]]] = {
    "learning rates": [{"lr": 0.1}, {"lr": 0.5}, {"lr": 1e-9}],
    "momentum": [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.5}],
    "nesterov": [{"momentum": m, "nesterov": True} for m in (0.0, 0.9, 0.5)],
    "decay": [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"weight_decay": 0.01, "momentum": 0.9}],
    **{
        optimizer: [
            {"optimizer": optimizer, "lr": lr, "beta1": b1, "beta2": b2, "eps": e, "weight_decay": w}
            for lr, b1, b2, e, w in (
                (0.01, 0.9, 0.999, 1e-8, 0.0), (0.02, 0.5, 0.9, 1e-4, 0.2), (1, 0, 0, 1, 0),
            )
        ]
        for optimizer in ("adam", "adamw")
    },
    "schedules": [
        {"schedule": "constant"}, {"schedule": "cosine"}, {"schedule": "steps", "milestones": (0.3, 0.6)},
        {"schedule": "inverse", "decay": 0.3}, {"schedule": "inverse", "decay": 0.1, "weight_decay": 0.2},
    ],
    "epochs": [{"epochs": 1}, {"epochs": 4}, {"epochs": 0}, {"epochs": 2, "schedule": "cosine"}],
    "seeds": [{"seed": 5}, {"seed": 6}, {"seed": 5}],
    "noise": [{"label_noise": 0.0}, {"label_noise": 0.5}, {"label_noise": 0.5, "label_noise_kind": "uniform"}],
    "confusion": [{"train_size": 20, "confusion": 7, "seed": 0}, {"train_size": 20, "confusion": 7, "seed": 1}],
    "initialisation": [{"init": "normal", "init_scale": 0.1}, {"init": "kaiming_uniform"}, {"init_scale": 2.0}],
    "dropout": [{"dropout": 0.0}, {"dropout": 0.5}, {"dropout": 0.1}],
    "decoupled decay": [
        {"decoupled_weight_decay": 0.0}, {"decoupled_weight_decay": 0.3, "weight_decay": 0.1, "momentum": 0.9},
    ],
    "decoupled decay of adamw": [
        {"optimizer": "adamw", "lr": 0.01, "decoupled_weight_decay": d, "weight_decay": w}
        for d, w in ((0.0, 0.2), (0.3, 0.0), (0.3, 0.2))
    ],
    "label smoothing": [{"label_smoothing": 0.0}, {"label_smoothing": 0.1}, {"label_smoothing": 0.5}],
    "random subsets": [{"train_subset": "random", "train_size": 18, "confusion": 4, "seed": s} for s in (0, 1)],
    "warm-up": [{"warmup": 0.0}, {"warmup": 1.5}, {"warmup": 2, "schedule": "cosine"}],
    "plateau": [
        {"schedule": "plateau", "patience": patience, "decay": 0.3, "lr": 0.3, "epochs": 8, "momentum": 0.9}
        for patience in (0, 1, 30)
    ],
    "one batch": [{"batch_size": 100, "seed": 0}, {"batch_size": 100, "seed": 1}],
    "whole batches": [{"train_size": 24, "seed": 0}, {"train_size": 24, "seed": 1}],
}  # fmt: skip


@pytest.mark.parametrize("what", VARIED)
def test_settings_may_differ_within_a_batch(what: str) -> None:
    recipes = [replace(BASE, **settings) for settings in VARIED[what]]
    assert len({compute_group_key(recipe, (6,), 3) for recipe in recipes}) == 1
    assert_same(train_together(recipes, DATA), [train_alone(recipe, DATA) for recipe in recipes])


@pytest.mark.parametrize(("kind", "crop"), [("flip", 4), ("crop", 1), ("flip_crop", 3)])
def test_augmentation_is_each_networks_own(kind: str, crop: int) -> None:
    recipes = [
        Recipe(network="lenet5", architecture=SHRUNK["lenet5"], seed=seed, augment=kind, crop=crop, batch_size=8,
               epochs=2, dtype="float64")
        for seed in range(2)
    ]  # fmt: skip
    assert_same(train_together(recipes, IMAGES), [train_alone(recipe, IMAGES) for recipe in recipes])


def test_who_meets_the_targets_leaves_and_the_others_go_on() -> None:
    recipes = [
        replace(BASE, lr=0.3, seed=0, epochs=60, target_loss=0.3),
        replace(BASE, lr=0.3, seed=1, epochs=60, target_loss=0.1, check_every=4),
        replace(BASE, lr=0.3, seed=2, epochs=60, target_error=0.0, momentum=0.9),
        replace(BASE, lr=0.3, seed=3, epochs=7, target_loss=1e-9),
        replace(BASE, lr=0.3, seed=4, epochs=11),
    ]
    found = train_together(recipes, DATA)
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes])
    assert [each.outcome.status for each in found] == ["done", "done", "done", "missed", "done"]
    epochs = [each.outcome.epochs for each in found]
    assert len(set(epochs)) == 5
    assert epochs[1] % 4 == 0
    assert epochs[3:] == [7, 11]
    assert found[0].outcome.train_loss <= 0.3


def test_a_network_that_blows_up_does_not_disturb_its_neighbours() -> None:
    recipes = [replace(BASE, seed=seed, lr=lr, epochs=6) for seed, lr in enumerate((0.1, 1e200, 0.2, 1e80))]
    found = train_together(recipes, DATA)
    assert [each.outcome.status for each in found] == ["done", "diverged", "done", "diverged"]
    calm = [0, 2]
    assert_same([found[place] for place in calm], [train_alone(recipes[place], DATA) for place in calm])
    for place in (1, 3):
        alone = train_alone(recipes[place], DATA).outcome
        assert (alone.status, alone.epochs) == ("diverged", found[place].outcome.epochs)
        assert found[place].outcome.train_loss != found[place].outcome.train_loss


def test_a_network_that_blows_up_with_convolutions_and_batch_norm_does_not_either() -> None:
    for name in ("lenet5", "resnet20"):
        for way in ("grouped", "each", "banded"):
            recipes = [
                Recipe(
                    network=name, architecture=SHRUNK[name], seed=seed, lr=lr, batch_size=10, epochs=2, dtype="float64"
                )
                for seed, lr in ((0, 0.01), (1, 1e300))
            ]
            found = train_together(recipes, IMAGES, way=way)
            assert [each.outcome.status for each in found] == ["done", "diverged"]
            assert_same(found[:1], [train_alone(recipes[0], IMAGES)])


def test_running_statistics_are_each_networks_own() -> None:
    recipes = [
        Recipe(network="resnet20", architecture=SHRUNK["resnet20"], seed=seed, batch_size=10, epochs=2, dtype="float64")
        for seed in range(2)
    ]
    first, second = (each.weights for each in train_together(recipes, IMAGES))
    means = [name for name in first if name.endswith("running_mean")]
    assert len(means) == 19
    assert all(not torch.equal(first[name], second[name]) and bool(first[name].any()) for name in means)
    assert int(first["1.norm1.num_batches_tracked"]) == 6
    assert_same([train_together(recipes, IMAGES)[1]], [train_alone(recipes[1], IMAGES)])


def test_recipes_that_cannot_be_stacked_come_back_in_their_order() -> None:
    recipes = [
        replace(BASE, batch_size=batch, architecture={"widths": widths}, dtype=dtype)
        for batch, widths, dtype in (
            (8, (7,), "float64"), (4, (7,), "float64"), (8, (5,), "float64"), (8, (7,), "float32"),
        )
    ]  # fmt: skip
    recipes.append(replace(recipes[0], seed=9))
    found = train_together(recipes, DATA)
    doubles = [0, 1, 2, 4]
    assert_same([found[place] for place in doubles], [train_alone(recipes[place], DATA) for place in doubles])
    assert found[3].weights["1.weight"].dtype is torch.float32
    assert_same([found[3]], [train_alone(recipes[3], DATA)], tolerance=1e-3)


def test_groups_hold_at_most_so_many_and_every_key_once() -> None:
    recipes = {f"k{number}": replace(BASE, seed=number, batch_size=8 if number % 3 else 4) for number in range(25)}
    found = group_runs(recipes, (6,), 3, most=5)
    assert sorted(key for group in found for key in group) == sorted(recipes)
    assert {len(group) for group in found} <= {4, 5}
    for group in found:
        assert len({recipes[key].batch_size for key in group}) == 1
    assert group_runs({}, (6,), 3, most=5) == []


def test_too_little_memory_halves_the_stack_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [replace(BASE, seed=seed, momentum=0.9) for seed in range(5)]
    plain, steps = VmappedModel.compute_logits, 0

    def cramped(self: VmappedModel, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal steps
        steps += kwargs["training"]
        # Memory runs out in the middle of the second epoch: what was half done is done again.
        if len(rows) > 2 and steps > 7 and kwargs["training"]:
            raise torch.OutOfMemoryError("no more")
        return plain(self, rows, *args, **kwargs)

    monkeypatch.setattr(VmappedModel, "compute_logits", cramped)
    found = train_together(recipes, DATA)
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes])
    for each in found:
        assert "memory did not hold 5 networks" in each.outcome.notes[0]


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
@pytest.mark.parametrize("moment", ["training", "judging"])
def test_memory_that_runs_out_late_changes_nothing(
    moment: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether every epoch was remembered or only the last one that a network left in."""
    recipes = [
        Recipe(
            network="resnet20", architecture=SHRUNK["resnet20"], seed=seed, lr=0.02, momentum=0.9, batch_size=10,
            epochs=2 if seed == 1 else 6, dtype="float64", schedule="inverse", augment="flip",
        )
        for seed in range(5)
    ]  # fmt: skip
    wanted = train_together(recipes, IMAGES)
    monkeypatch.setattr(train_batched, "REMEMBER_EVERY", seconds)
    plain, epochs, sizes = VmappedModel.compute_logits, 0, []

    def cramped(self: VmappedModel, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Four are left since the second epoch. In the fifth, or when its end is judged, memory holds no more than two.
        sizes.append(len(rows))
        if (
            len(rows) > 2
            and epochs >= (4 if moment == "training" else 5)
            and kwargs["training"] == (moment != "judging")
        ):
            raise torch.OutOfMemoryError("no more")
        return plain(self, rows, *args, **kwargs)

    def tell(done: int, most: int) -> None:
        nonlocal epochs
        epochs += 1

    monkeypatch.setattr(VmappedModel, "compute_logits", cramped)
    found = train_together(recipes, IMAGES, tell=tell)
    assert sizes[-1] == 2
    assert epochs > 6, "no epoch was done by halves"
    for one, other in zip(found, wanted, strict=True):
        assert one.outcome.epochs == other.outcome.epochs == len(one.outcome.curve)
    assert_same(found, wanted)
    assert found[1].outcome.notes == ()
    assert all("memory did not hold 4 networks" in found[place].outcome.notes[0] for place in (0, 2, 3, 4))


def test_networks_trained_alone_are_not_repeated_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [replace(BASE, network="training_cases:noisy", architecture={}, seed=seed) for seed in range(4)]
    trained: list[int] = []

    def cramped(recipe: Recipe, *args: Any, **options: Any) -> Any:
        trained.append(recipe.seed)
        if trained == [0, 1, 2]:
            raise torch.OutOfMemoryError("no more")
        return train_alone(recipe, *args, **options)

    wanted = train_together(recipes, DATA)
    monkeypatch.setattr(train_batched, "train_alone", cramped)
    assert_same(train_together(recipes, DATA), wanted)
    assert trained == [0, 1, 2, 2, 3]


def test_too_little_memory_for_the_weights_halves_the_stack_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [replace(BASE, seed=seed) for seed in range(4)]
    plain = VmappedModel.pack_models

    def cramped(self: VmappedModel, models: Any) -> Any:
        if len(models) > 1:
            raise torch.OutOfMemoryError("no more")
        return plain(self, models)

    monkeypatch.setattr(VmappedModel, "pack_models", cramped)
    found = train_together(recipes, DATA)
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes])
    assert [len(each.outcome.notes) for each in found] == [2, 2, 2, 2]


def test_a_single_network_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: VmappedModel, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(VmappedModel, "compute_logits", full)
    with pytest.raises(torch.OutOfMemoryError):
        train_together([BASE], DATA)


def test_a_stack_that_is_too_large_for_a_cpu_is_split_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [replace(BASE, seed=seed) for seed in range(5)]
    wanted = train_together(recipes, DATA)
    monkeypatch.setattr(batched_epoch, "ROOM", 600)
    sizes = set()
    plain = VmappedModel.compute_logits

    def watched(self: VmappedModel, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.add(len(rows))
        return plain(self, rows, *args, **kwargs)

    monkeypatch.setattr(VmappedModel, "compute_logits", watched)
    found = train_together(recipes, DATA)
    assert max(sizes) == 2
    assert_same(found, wanted)
    assert not any(each.outcome.notes for each in found)


@pytest.mark.parametrize("name", ["undecided", "noisy"])
def test_a_network_that_cannot_be_stacked_is_trained_alone_and_says_so(name: str) -> None:
    recipes = [replace(BASE, network=f"training_cases:{name}", architecture={}, seed=seed) for seed in range(3)]
    told: list[tuple[int, int]] = []
    found = train_together(recipes, DATA, tell=lambda done, most: told.append((done, most)))
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes], tolerance=1e-15)
    assert all("trained alone, since torch.func could not batch" in each.outcome.notes[0] for each in found)
    assert told


def test_parameters_that_are_fixed_unused_or_shared_are_as_alone() -> None:
    recipes = [
        replace(BASE, network="training_cases:partly_fixed", architecture={}, seed=seed, weight_decay=0.1, momentum=0.9)
        for seed in range(2)
    ]
    found = train_together(recipes, DATA)
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes])
    assert not any(each.outcome.notes for each in found)
    assert torch.equal(found[0].weights["again.weight"], found[0].weights["first.weight"])


def test_evaluation_in_small_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [replace(BASE, seed=seed, epochs=1) for seed in range(2)]
    wanted = train_together(recipes, DATA)
    monkeypatch.setattr("saltflat.studies.training.vmapped_model.ROOM", {"cpu": 300})
    assert_same(train_together(recipes, DATA), wanted, tolerance=1e-14)


def test_it_is_told_after_every_epoch() -> None:
    told: list[tuple[int, int]] = []
    recipes = [replace(BASE, epochs=2), replace(BASE, epochs=4, seed=1), replace(BASE, epochs=3, batch_size=4)]
    train_together(recipes, DATA, tell=lambda done, most: told.append((done, most)))
    assert told == [(done, 7) for done in range(1, 8)]


def test_the_users_data_and_random_state_are_left_alone() -> None:
    data = examples()
    before = [each.clone() for each in vars(data).values()]
    state = torch.get_rng_state()
    train_together([replace(BASE, dropout=0.2, label_noise=0.5)], data)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(each, old) for each, old in zip(vars(data).values(), before, strict=True))


def test_seconds_of_all_networks_make_up_the_time() -> None:
    found = train_together([replace(BASE, seed=seed) for seed in range(3)], DATA)
    assert all(each.seconds > 0 for each in found)


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="Try 'grouped'"):
        train_together([BASE], DATA, way="groupped")


@pytest.mark.parametrize("way", ["grouped", "each", "banded"])
def test_strides_padding_groups_and_dilation_are_as_alone(way: str) -> None:
    recipes = [
        replace(BASE, network="training_cases:odd_convolutions", architecture={}, seed=seed, epochs=2)
        for seed in range(2)
    ]
    found = train_together(recipes, IMAGES, way=way)
    assert_same(found, [train_alone(recipe, IMAGES) for recipe in recipes])
    assert not any(each.outcome.notes for each in found)


@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_the_precision_of_products_is_given_back(dtype: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    seen = []

    def tell(done: int, most: int) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))

    train_together([replace(BASE, epochs=1, dtype=dtype, dropout=0.1)], DATA, tell=tell)
    assert seen == [("highest", False) if dtype == "float32" else ("high", True)]
    after = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    assert after == before


def test_three_digits_are_of_products_on_a_gpu_alone() -> None:
    recipes = [replace(BASE, dtype=dtype) for dtype in ("float32", "tf32")]
    assert compute_group_key(recipes[0], (6,), 3) != compute_group_key(recipes[1], (6,), 3)
    full, short = train_together(recipes, DATA)
    assert all(value.dtype is torch.float32 for value in short.weights.values())
    assert_same([short], [full], tolerance=1e-3)
    assert_same([short], [train_alone(recipes[1], DATA)], tolerance=1e-3)


def test_a_recipe_travels_between_processes() -> None:
    for recipe in (Recipe(), BASE, Recipe.from_config({"width": 3, "lr": 0.2})):
        assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize(
    ("name", "architecture", "why"),
    [
        ("tied", {}, "is not what it is alone"),
        ("remembering", {}, "is not what it is alone"),
        ("remembering", {"counts": True}, "counts or remembers"),
        pytest.param("normed", {}, "deepcopy", marks=pytest.mark.filterwarnings("ignore:.*weight_norm")),
    ],
)
def test_what_would_come_out_otherwise_in_a_stack_is_trained_alone(
    name: str, architecture: dict[str, bool], why: str
) -> None:
    recipes = [
        replace(BASE, network=f"training_cases:{name}", architecture=architecture, seed=seed, epochs=3)
        for seed in range(2)
    ]
    found = train_together(recipes, DATA)
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes])
    assert all(why in each.outcome.notes[0] for each in found)


@pytest.mark.parametrize("way", ["auto", "grouped", "each", "banded"])
def test_images_that_are_convolved_one_by_one_are_as_alone(way: str) -> None:
    # As many rows of outputs as channels: a batch and a picture could be taken for each other.
    images = examples((3, 7, 7))
    recipes = [replace(BASE, network="training_cases:one_by_one", architecture={}, seed=seed) for seed in range(2)]
    found = train_together(recipes, images, way=way)
    assert_same(found, [train_alone(recipe, images) for recipe in recipes])
    assert not any(each.outcome.notes for each in found)


def test_inputs_that_are_whole_numbers_stay_whole() -> None:
    draws = torch.Generator().manual_seed(0)
    plain = examples((4,))
    texts = Examples(
        torch.randint(9, plain.train_inputs.shape, generator=draws), plain.train_labels,
        torch.randint(9, plain.test_inputs.shape, generator=draws), plain.test_labels,
    )  # fmt: skip
    recipes = [replace(BASE, network="training_cases:words", architecture={}, seed=seed) for seed in range(2)]
    found = train_together(recipes, texts)
    assert_same(found, [train_alone(recipe, texts) for recipe in recipes])
    assert not any(each.outcome.notes for each in found)


def test_a_network_that_only_works_in_float32_is_tried_in_float32() -> None:
    recipes = [
        replace(BASE, network="training_cases:casting", architecture={}, dtype="float32", seed=seed)
        for seed in range(2)
    ]
    found = train_together(recipes, DATA)
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes], tolerance=1e-4)
    assert not any(each.outcome.notes for each in found)


@pytest.mark.parametrize("name", ["resnet20", "wrn_28_2", "densenet_bc", "ibayashi_lenet"])
@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_rounding_is_not_taken_for_a_mistake(name: str, dtype: str) -> None:
    recipes = [
        Recipe(network=name, architecture=SHRUNK[name], dtype=dtype, epochs=1, batch_size=10, seed=seed)
        for seed in range(2)
    ]
    assert not any(each.outcome.notes for each in train_together(recipes, IMAGES))
