"""SAM, its relatives and the Fisher penalty train the same networks alone, together and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from training_cases import SHRUNK, assert_same, examples

from saltflat.studies.gradient_rules import GRADIENT_RULES, find_gradient_rule
from saltflat.studies.recipe import Recipe
from saltflat.studies.training import train_batched
from saltflat.studies.training.build import build_network
from saltflat.studies.training.examples import draw_order
from saltflat.studies.training.train_batched import compute_group_key, train_together
from saltflat.studies.training.train_one import train_alone
from saltflat.studies.training.vmapped_model import VmappedModel
from saltflat.training import ASAM, SAM, FisherPenalty, GradientNormPenalty, TwoPass

DATA = examples()
IMAGES = examples((2, 16, 16))
BASE = Recipe(architecture={"widths": (7, 5)}, lr=0.1, batch_size=8, epochs=3, dtype="float64")
# Settings of each method that may differ between the networks of a batch.
METHODS: dict[str, list[dict[str, Any]]] = {
    "sam": [{"sam": 0.05}, {"sam": 0.5}],
    "asam": [{"asam": 0.5}, {"asam": 1.0, "asam_eta": 0.1}],
    "gradient_norm": [{"gradient_norm": 0.1}, {"gradient_norm": 0.05, "gradient_norm_balance": 0.3}],
    "fisher_penalty": [
        {"fisher_penalty": 40.0, "fisher_parts": 3},
        {"fisher_penalty": 10.0, "fisher_parts": 3, "fisher_alpha": 1e-2, "fisher_clip": 0.2, "fisher_start_epoch": 1},
    ],
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
}


def test_there_is_a_case_for_every_method() -> None:
    assert METHODS.keys() == GRADIENT_RULES.keys()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_batch_of_networks_is_trained_as_each_alone(method: str, optimizer: str) -> None:
    recipes = [
        replace(
            BASE, **OPTIMIZERS[optimizer], **settings, seed=seed, weight_decay=0.05 * seed, dropout=0.3 * seed,
            label_smoothing=0.1 * seed,
        )
        for seed, settings in enumerate(METHODS[method])
    ]  # fmt: skip
    assert len({compute_group_key(recipe, (6,), 3) for recipe in recipes}) == 1
    found = train_together(recipes, DATA)
    assert not any(each.outcome.notes for each in found)
    assert_same(found, [train_alone(recipe, DATA) for recipe in recipes])
    off: dict[str, Any] = {method: 0.0, "fisher_clip": None}
    plain = train_together([replace(recipe, **off) for recipe in recipes], DATA)
    for one, other in zip(found, plain, strict=True):
        assert not torch.allclose(one.weights["1.weight"], other.weights["1.weight"], rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["auto", "separate"])
@pytest.mark.parametrize("name", ["lenet5", "resnet20"])
def test_images_batch_norm_and_augmentation_are_as_alone(name: str, way: str, method: str) -> None:
    recipes = [
        Recipe(
            network=name, architecture=SHRUNK[name], seed=seed, lr=0.03, momentum=0.9, batch_size=12, epochs=2,
            augment="flip_crop", crop=2, dtype="float64", dropout=0.2, **settings,
        )
        for seed, settings in enumerate(METHODS[method])
    ]  # fmt: skip
    assert_same(train_together(recipes, IMAGES, way=way), [train_alone(recipe, IMAGES) for recipe in recipes])


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_that_of_the_library(method: str) -> None:
    """A plain loop with the optimizers of saltflat.training gives the weights of a recipe."""
    recipe = replace(BASE, **METHODS[method][0], momentum=0.9, weight_decay=0.01)
    model = build_network(recipe, DATA.shape, DATA.classes)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    inputs = DATA.train_inputs.double()
    wrappers: dict[str, Callable[[], TwoPass]] = {
        "sam": lambda: SAM(model, base, rho=0.05),
        "asam": lambda: ASAM(model, base, rho=0.5, eta=0.01),
        "gradient_norm": lambda: GradientNormPenalty(model, base, rho=0.1, balance=0.8),
    }
    penalty = FisherPenalty(model, parts=3, beta=40.0) if method == "fisher_penalty" else None
    wrapper = None if penalty is not None else wrappers[method]()
    model.train()
    for epoch in range(3):
        for some in draw_order(0, epoch, len(inputs)).split(8):
            if penalty is not None:
                penalty.step(base, (inputs[some], DATA.train_labels[some]))
                continue

            def closure(some: torch.Tensor = some) -> torch.Tensor:
                base.zero_grad()
                loss = F.cross_entropy(model(inputs[some]), DATA.train_labels[some])
                loss.backward()
                return loss

            assert wrapper is not None
            wrapper.step(closure)
    found = train_together([recipe], DATA)[0].weights
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_a_training_that_was_interrupted_ends_as_if_it_had_not_been(method: str, tmp_path: Path) -> None:
    recipes = [
        replace(BASE, **settings, seed=seed, dropout=0.3, momentum=0.9, schedule="plateau", patience=0, warmup=0.5)
        for seed, settings in enumerate(METHODS[method])
    ]
    wanted = train_together(recipes, DATA)
    done: list[int] = []

    def interrupt(epochs: int, most: int) -> None:
        done.append(epochs)
        if epochs == 2 and len(done) == 2:
            raise KeyboardInterrupt

    # A checkpoint is written after tell, so the second epoch is lost and repeated.
    checkpoint, again = tmp_path / "together", list[int]()
    with pytest.raises(KeyboardInterrupt):
        train_together(recipes, DATA, checkpoint=checkpoint, every=0.0, tell=interrupt)
    found = train_together(recipes, DATA, checkpoint=checkpoint, tell=lambda epochs, most: again.append(epochs))
    assert again[0] == 2
    assert_same(found, wanted)
    own = tmp_path / "alone"
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        train_alone(recipes[1], DATA, checkpoint=own, every=0.0, tell=interrupt)
    assert own.exists()
    assert_same([train_alone(recipes[1], DATA, checkpoint=own)], wanted[1:])


def test_methods_and_numbers_of_parts_make_groups() -> None:
    recipes = [Recipe(), Recipe(sam=0.1), Recipe(sam=0.2), Recipe(asam=0.1), Recipe(fisher_penalty=1.0)]
    recipes += [Recipe(fisher_penalty=1.0, fisher_parts=4), Recipe(fisher_parts=4)]
    keys = [compute_group_key(recipe, (6,), 3) for recipe in recipes]
    assert keys[1] == keys[2]
    assert keys[0] == keys[6]
    assert len(set(keys)) == 5
    assert find_gradient_rule(Recipe()) is None


def test_more_parts_than_examples_make_every_example_a_part() -> None:
    recipe = replace(BASE, fisher_penalty=5.0, fisher_parts=100)
    assert_same(train_together([recipe], DATA), [train_alone(recipe, DATA)])


@pytest.mark.parametrize("method", [*METHODS, "none"])
@pytest.mark.parametrize(("name", "way"), [("lenet5", "auto"), ("lenet5", "separate"), ("resnet20", "auto")])
def test_bfloat16_is_close_to_float32_and_the_same_alone(method: str, name: str, way: str) -> None:
    settings = METHODS.get(method, [{}])[0]
    base = Recipe(
        network=name, architecture=SHRUNK[name], lr=0.02, momentum=0.9, batch_size=8, epochs=3, dropout=0.2,
        augment="flip", **settings,
    )  # fmt: skip
    coarse = [replace(base, dtype="bf16", seed=seed) for seed in range(2)]
    assert compute_group_key(base, (2, 16, 16), 3) != compute_group_key(coarse[0], (2, 16, 16), 3)
    found = train_together(coarse, IMAGES, way=way)
    assert all(value.dtype in (torch.float32, torch.int64) for value in found[0].weights.values())
    fine = train_together([replace(each, dtype="float32") for each in coarse], IMAGES)
    alone = [train_alone(each, IMAGES) for each in coarse]
    for one, other, own in zip(found, fine, alone, strict=True):
        assert one.outcome.train_loss == pytest.approx(own.outcome.train_loss, rel=0.03)
        assert one.outcome.train_loss == pytest.approx(other.outcome.train_loss, rel=0.05)
        # Without BatchNorm, all passes of the Fisher penalty are over parts, which stay in float32.
        assert (one.outcome.train_loss != other.outcome.train_loss) == (
            (method, name, way) != ("fisher_penalty", "lenet5", "auto")
        )


def test_random_subsets_are_other_examples_for_every_seed() -> None:
    recipes = [replace(BASE, train_subset="random", train_size=12, seed=seed, label_noise=0.5) for seed in range(2)]
    first, again, other = (
        train_batched.train_together([each], DATA)[0].outcome for each in (recipes[0], recipes[0], recipes[1])
    )
    assert first.train_loss == again.train_loss != other.train_loss
    assert first.train_examples == 12


PENALTY: dict[str, Any] = {"fisher_penalty": 40.0, "fisher_parts": 3, "fisher_alpha": 1e-2}


@pytest.mark.parametrize("way", ["auto", "separate"])
def test_the_penalty_of_networks_with_buffers_is_as_alone(way: str) -> None:
    """Buffers that a network writes itself, statistics of InstanceNorm, and a BatchNorm that stays in eval mode."""
    for name, data in (("running_mean", DATA), ("frozen_norm", DATA), ("instance_norm", IMAGES)):
        recipes = [
            replace(BASE, network=f"training_cases:{name}", architecture={}, seed=seed, momentum=0.9, **PENALTY)
            for seed in range(2)
        ]
        found = train_together(recipes, data, way=way)
        assert_same(found, [train_alone(recipe, data) for recipe in recipes])
        assert any("writes to buffers" in note for note in found[0].outcome.notes) == (name == "running_mean")


def test_bfloat16_leaves_the_inputs_of_a_users_network_as_they_are() -> None:
    far = examples()
    far = replace(far, train_inputs=far.train_inputs + 1000, test_inputs=far.test_inputs + 1000)
    recipe = Recipe(network="training_cases:shifted", lr=0.05, batch_size=8, epochs=4, dtype="bf16")
    (found,) = train_together([recipe], far)
    assert found.outcome.train_loss == pytest.approx(train_alone(recipe, far).outcome.train_loss, rel=0.02)


def test_a_network_that_draws_random_numbers_is_trained_alone_in_bfloat16_too() -> None:
    recipe = Recipe(network="training_cases:normed_and_noisy", lr=0.1, batch_size=8, epochs=3, dtype="bf16")
    state = torch.get_rng_state()
    (found,) = train_together([recipe], DATA)
    assert torch.equal(torch.get_rng_state(), state)
    assert "draws random numbers" in found.outcome.notes[0]
    assert_same([found], [train_alone(recipe, DATA)], tolerance=1e-12)


def test_layers_that_vmap_cannot_run_under_autocast_run_one_by_one() -> None:
    recipes = [
        Recipe(network=f"training_cases:{name}", lr=0.02, batch_size=8, epochs=2, dtype="bf16", seed=seed)
        for name in ("transposed", "instance_norm")
        for seed in range(2)
    ]
    found = train_together(recipes, IMAGES)
    for one, recipe in zip(found, recipes, strict=True):
        assert not one.outcome.notes
        assert one.outcome.train_loss == pytest.approx(train_alone(recipe, IMAGES).outcome.train_loss, rel=0.05)


def test_a_resumed_training_goes_on_one_by_one(tmp_path: Path) -> None:
    recipes = [
        Recipe(network="training_cases:transposed", lr=0.02, batch_size=8, epochs=3, dtype="bf16", seed=seed)
        for seed in range(2)
    ]
    wanted, checkpoint = train_together(recipes, IMAGES), tmp_path / "c"

    def interrupt(done: int, most: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_together(recipes, IMAGES, checkpoint=checkpoint, every=0.0, tell=interrupt)
    assert_same(train_together(recipes, IMAGES, checkpoint=checkpoint), wanted, tolerance=1e-12)


def test_parts_of_a_batch_count_in_the_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [replace(BASE, seed=seed, fisher_penalty=1.0, fisher_parts=4) for seed in range(4)]
    wanted = train_together(recipes, DATA)
    monkeypatch.setattr("saltflat.studies.training.batched_epoch.ROOM", 10_000)
    sizes: set[int] = set()
    plain = VmappedModel.compute_logits

    def watched(self: VmappedModel, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.add(len(rows))
        return plain(self, rows, *args, **kwargs)

    monkeypatch.setattr(VmappedModel, "compute_logits", watched)
    assert_same(train_together(recipes, DATA), wanted)
    assert max(sizes) == 8, "two networks of four parts"
