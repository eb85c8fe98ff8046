"""Training one network: against plain loops over torch.optim, written from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_cases import examples, noisy

from saltflat.studies.recipe import Recipe
from saltflat.studies.schedules import compute_epoch_rates, compute_learning_rate
from saltflat.studies.training.build import build_network
from saltflat.studies.training.draws import draw_short_numbers, draw_words, make_keys
from saltflat.studies.training.dropout import Dropout, DropoutMasks
from saltflat.studies.training.examples import Augmentation, draw_order
from saltflat.studies.training.outcome import evaluate_model, evaluate_outcome
from saltflat.studies.training.train_one import train_alone

DATA = examples()
BASE = Recipe(architecture={"widths": (7, 5)}, lr=0.1, batch_size=8, epochs=3, dtype="float64")


def loop(recipe: Recipe, make: Callable[[Any], torch.optim.Optimizer]) -> nn.Module:
    """The textbook loop."""
    model = build_network(recipe, DATA.shape, DATA.classes).train()
    optimizer = make(model.parameters())
    inputs = DATA.train_inputs.double()
    for epoch in range(recipe.epochs):
        for some in draw_order(recipe.seed, epoch, len(inputs)).split(recipe.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[some]), DATA.train_labels[some]).backward()
            optimizer.step()
    return model.eval()


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "plain": ({}, lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "nesterov": (
        {"momentum": 0.8, "nesterov": True},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    ),
    "nesterov without momentum": ({"nesterov": True}, lambda p: torch.optim.SGD(p, 0.1)),
    "sgd with weight decay": (
        {"momentum": 0.9, "weight_decay": 0.03},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.03),
    ),
    "adam": (
        {"optimizer": "adam", "lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95), eps=1e-6),
    ),
    "adam with weight decay": (
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.3},
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.3),
    ),
    "adamw": (
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.3},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.3),
    ),
    "adamw without weight decay": (
        {"optimizer": "adamw", "lr": 0.01},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.0),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_torchs_optimizer(name: str) -> None:
    settings, make = OPTIMIZERS[name]
    recipe = replace(BASE, **settings)
    wanted = loop(recipe, make)
    found = train_alone(recipe, DATA).weights
    for key, value in wanted.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_weight_decay_is_decoupled_for_adamw_alone(optimizer: str) -> None:
    """Adam's first step has the length of the learning rate, whatever is added to the gradient."""
    recipe = replace(BASE, optimizer=optimizer, epochs=1, batch_size=29, lr=0.1, eps=1e-30)
    plain, decayed = (train_alone(replace(recipe, weight_decay=decay), DATA).weights for decay in (0.0, 0.5))
    before = build_network(recipe, DATA.shape, DATA.classes).state_dict()
    for name, value in plain.items():
        if optimizer == "adam":
            assert bool(((decayed[name] - before[name]).abs() < 0.1 + 1e-9).all())
        else:  # lr * weight_decay of the weights before the step
            torch.testing.assert_close(decayed[name], value - 0.05 * before[name], rtol=1e-12, atol=1e-14)


def _torchs_rates(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_schedules_are_torchs() -> None:
    base = Recipe(lr=0.4, epochs=10, decay=0.2, milestones=(0.3, 0.7))
    schedulers = torch.optim.lr_scheduler
    wanted = {
        "constant": [0.4] * 10,
        "cosine": _torchs_rates(lambda o: schedulers.CosineAnnealingLR(o, 10), 10),
        "steps": _torchs_rates(lambda o: schedulers.MultiStepLR(o, [3, 7], 0.2), 10),
    }
    for name, rates in wanted.items():
        found = [compute_learning_rate(replace(base, schedule=name), epoch, 99 * epoch) for epoch in range(10)]
        assert found == pytest.approx(rates, rel=1e-12), name
    inverse = [
        compute_learning_rate(replace(base, schedule="inverse", decay=1e-4), step // 5, step) for step in range(20)
    ]
    assert inverse == pytest.approx(
        _torchs_rates(lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + 1e-4 * t)), 20), rel=1e-12
    )


def test_a_plateau_is_torchs() -> None:
    losses = [1.0, 0.9, 0.91, 0.90001, 0.92, 0.7, 0.8, 0.8, 0.8, 0.69999, 0.9, 0.9, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]
    for patience, lr in ((0, 0.4), (1, 0.4), (2, 0.4), (0, 1e-6)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
        torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.2, patience=patience)
        recipe = Recipe(lr=lr, schedule="plateau", decay=0.2, patience=patience, epochs=len(losses))
        seen = set()
        for epoch in range(len(losses)):
            rate = compute_learning_rate(recipe, epoch, 0, curve=losses[:epoch])
            assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
            seen.add(rate)
            torchs.step(losses[epoch])
        assert len(seen) > 2


def test_a_warm_up_is_torchs_and_then_the_schedules_own() -> None:
    base = Recipe(lr=0.4, epochs=6, warmup=1.5, schedule="cosine")
    rates = torch.cat([compute_epoch_rates(base, epoch, 4, ()) for epoch in range(6)]).tolist()
    plain = torch.cat([compute_epoch_rates(replace(base, warmup=0), epoch, 4, ()) for epoch in range(6)]).tolist()
    assert [one / other for one, other in zip(rates, plain, strict=True)] == pytest.approx(
        [(step + 1) / 6 for step in range(6)] + [1.0] * 18, rel=1e-12
    )
    linear = torch.optim.lr_scheduler.LinearLR
    constant = torch.cat([compute_epoch_rates(replace(base, schedule="constant"), epoch, 4, ()) for epoch in range(6)])
    wanted = _torchs_rates(lambda o: linear(o, start_factor=1 / 6, total_iters=5), 24)
    assert constant.tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_outcome_is_what_the_definitions_say() -> None:
    recipe = replace(BASE, label_noise=0.4, train_size=20, confusion=6)
    found = train_alone(recipe, DATA)
    model = build_network(recipe, DATA.shape, DATA.classes)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.load_state_dict(found.weights)
    outcome = found.outcome
    from saltflat.studies.training.examples import make_training_set

    data = make_training_set(recipe, DATA)
    sides = [("train", data.inputs[:20], data.labels[:20]), ("test", DATA.test_inputs, DATA.test_labels)]
    for side, inputs, labels in sides:
        chances = model(inputs.double()).softmax(-1).detach()
        losses = [-math.log(chances[row, label]) for row, label in enumerate(labels.tolist())]
        wrong = [int(chances[row].argmax()) != label for row, label in enumerate(labels.tolist())]
        assert getattr(outcome, f"{side}_loss") == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert getattr(outcome, f"{side}_error") == pytest.approx(sum(wrong) / len(wrong), rel=1e-12)
        assert getattr(outcome, f"{side}_examples") == len(losses)
    after = dict(model.named_parameters())
    numbers = torch.cat([value.detach().flatten() for value in after.values()])
    steps = torch.cat([(value.detach() - before[name]).flatten() for name, value in after.items()])
    assert outcome.parameters == len(numbers)
    assert outcome.norm == pytest.approx(float(numbers.norm()), rel=1e-12)
    assert outcome.distance == pytest.approx(float(steps.norm()), rel=1e-12)
    assert outcome.status == "done"
    assert len(outcome.curve) == outcome.epochs == 3
    # The same, for a model that anyone trained.
    again = evaluate_outcome(model, recipe, DATA.to("cpu", torch.float64), before, 3, outcome.curve, notes=("mine",))
    assert again == replace(outcome, notes=("mine",))
    plain = evaluate_outcome(model, None, DATA.to("cpu", torch.float64))
    assert (plain.train_examples, plain.distance, plain.status) == (29, None, "done")


def test_the_curve_is_the_mean_over_steps_as_training_saw_them() -> None:
    recipe = replace(BASE, epochs=1, lr=1e-300)
    model = build_network(recipe, DATA.shape, DATA.classes)
    with torch.no_grad():
        losses = [
            float(F.cross_entropy(model(DATA.train_inputs[some].double()), DATA.train_labels[some]))
            for some in draw_order(0, 0, 29).split(8)
        ]
    assert train_alone(recipe, DATA).outcome.curve == pytest.approx([sum(losses) / 4], rel=1e-12)


def test_a_training_stops_when_its_targets_are_met_and_not_before_it_is_looked() -> None:
    recipe = replace(BASE, lr=0.3, epochs=200, target_loss=0.2, target_error=0.1)
    first = train_alone(recipe, DATA).outcome
    assert first.status == "done"
    assert first.epochs < 200
    assert first.train_loss <= 0.2
    assert first.train_error <= 0.1
    assert train_alone(replace(recipe, epochs=first.epochs - 1), DATA).outcome.status == "missed"
    seldom = train_alone(replace(recipe, check_every=first.epochs + 3), DATA).outcome
    assert seldom.epochs == first.epochs + 3
    unseen = train_alone(replace(recipe, check_every=1000, epochs=first.epochs + 1), DATA).outcome
    assert (unseen.epochs, unseen.status) == (first.epochs + 1, "done")


def test_a_training_that_blows_up_says_so() -> None:
    outcome = train_alone(replace(BASE, lr=1e200, epochs=9), DATA).outcome
    assert outcome.status == "diverged"
    assert outcome.epochs < 9
    assert all(map(math.isnan, (outcome.train_loss, outcome.train_error, outcome.test_loss, outcome.test_error)))


def test_no_epochs_leave_the_network_as_it_was() -> None:
    found = train_alone(replace(BASE, epochs=0, target_loss=1e-9), DATA)
    for name, value in build_network(BASE, DATA.shape, DATA.classes).state_dict().items():
        assert torch.equal(found.weights[name], value)
    assert (found.outcome.epochs, found.outcome.distance, found.outcome.status) == (0, 0.0, "missed")


def test_evaluation_is_the_same_in_batches_and_gives_back_every_mode() -> None:
    norm, dropped = nn.BatchNorm1d(4), nn.Dropout(0.5).eval()
    model = nn.Sequential(nn.Linear(6, 4), norm, dropped, nn.Linear(4, 3)).double()
    modes = [module.training for module in model.modules()]
    inputs = DATA.train_inputs.double()
    whole = evaluate_model(model, inputs, DATA.train_labels)
    assert evaluate_model(model, inputs, DATA.train_labels, batch_size=4) == pytest.approx(whole, rel=1e-12)
    assert [module.training for module in model.modules()] == modes
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


def test_random_words_are_splitmix64s() -> None:
    def compute_word(key: int, counter: int) -> int:
        word = (key + counter * 0x9E3779B97F4A7C15) % 2**64
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
        return word ^ (word >> 31)

    keys = torch.tensor([[0], [1], [-1], [2**63 - 1], [-(2**63)], [123456789]])
    counters = torch.tensor([[0, 1, 2, 50_000, 2**40]])
    found = draw_words(keys, counters)
    for key, row in zip(keys[:, 0].tolist(), found.tolist(), strict=True):
        assert [each % 2**64 for each in row] == [compute_word(key, counter) for counter in counters[0].tolist()]


def test_short_numbers_are_uniform_and_independent_of_their_neighbours() -> None:
    keys = draw_words(torch.tensor([[3]]), torch.arange(1, 2001)[None])
    numbers = (draw_short_numbers(keys, 203)[0].double() + 32768) / 65536
    assert numbers.shape == (2000, 203)
    counts = (numbers.flatten() * 64).long().bincount(minlength=64).double()
    expected = numbers.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 110  # 63 degrees of freedom: exceeded once in 4000
    centred = (numbers - 0.5) * 12**0.5
    for one, other in (
        (centred[:, :-1], centred[:, 1:]),
        (centred[:-1], centred[1:]),
        (centred[:, 4:], centred[:, :-4]),
    ):
        assert abs(float((one * other).mean())) < 4 / one.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_images_are_cut_and_mirrored_as_their_changes_say(channels: int, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(0)
    images = (100 * torch.rand(40, channels, 5, 7, generator=draws)).to(dtype)
    augmentation = Augmentation(flip=True, padding=3)
    which = torch.randperm(40, generator=draws)[None]
    mirrored, starts = augmentation.draw(torch.tensor([[5]]), which)
    found = augmentation.read(augmentation.pad(images), images[0], which, mirrored, starts)
    assert found.shape == (1, 40, channels, 5, 7)
    for place, number in enumerate(which[0].tolist()):
        down, across = starts[0, place].tolist()
        wanted = torch.zeros(channels, 5, 7, dtype=dtype)
        for row in range(5):
            for column in range(7):
                source_row, source_column = row + down - 3, column + across - 3
                if 0 <= source_row < 5 and 0 <= source_column < 7:
                    wanted[:, row, column] = images[number, :, source_row, source_column]
        if mirrored[0, place]:
            wanted = wanted.flip(-1)
        assert torch.equal(found[0, place], wanted)


@pytest.mark.parametrize("kind", ["none", "flip", "crop", "flip_crop"])
def test_the_kinds_of_augmentation_do_what_they_are_called(kind: str) -> None:
    recipe, places = Recipe(augment=kind, crop=2, seed=1), torch.arange(4000)[None]
    augmentation = Augmentation.from_recipe(recipe)
    if kind == "none":
        assert augmentation is None
        return
    assert augmentation is not None
    mirrored, starts = augmentation.draw(make_keys([recipe], "augment", 0), places)
    assert float(mirrored.double().mean()) == pytest.approx(0.5 if "flip" in kind else 0.0, abs=0.04)
    wanted = [4000 / 5] * 5 if "crop" in kind else [4000]
    for direction in starts[0].unbind(1):
        assert direction.bincount().tolist() == pytest.approx(wanted, rel=0.15)
    other, elsewhere = augmentation.draw(make_keys([recipe], "augment", 1), places)
    assert not torch.equal(elsewhere, starts) or not torch.equal(other, mirrored)


def test_dropout_keeps_a_share_of_units_and_their_mean() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (50,), "b": (10, 4)}
    recipes = [Recipe(dropout=share, seed=seed) for share, seed in ((0.2, 0), (0.2, 1), (0.0, 2), (0.7, 3))]

    def draw(which: list[Recipe], places: Tensor, epoch: int = 0) -> dict[str, Tensor]:
        masks = DropoutMasks.from_recipes(shapes, which, torch.float64, torch.device("cpu"))
        assert masks is not None
        return masks.draw(make_keys(which, "dropout", epoch), places.expand(len(which), -1))

    drawn = draw(recipes, torch.arange(200))
    assert {name: tuple(each.shape) for name, each in drawn.items()} == {"a": (4, 200, 50), "b": (4, 200, 10, 4)}
    for each in drawn.values():
        for share, values in zip((0.2, 0.2, 0.0, 0.7), each, strict=True):
            assert float((values == 0).double().mean()) == pytest.approx(share, abs=0.02)
            kept = values[values != 0]
            torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)), rtol=1e-4, atol=0)
        assert not torch.equal(each[0], each[1])
    assert not torch.equal(draw(recipes, torch.arange(200, 400))["a"], drawn["a"])
    # An equal recipe alone, in another order: seed, epoch and example determine what is dropped.
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    for epoch in (0, 1):
        again = draw([Recipe(dropout=0.2, seed=1)], order, epoch)
        assert torch.equal(again["b"][0], drawn["b"][1][order]) == (epoch == 0)
    assert DropoutMasks.from_recipes({"a": (50,)}, [Recipe()], torch.float32, torch.device("cpu")) is None


def test_dropout_changes_training_and_not_what_comes_of_it_in_eval_mode() -> None:
    recipe = replace(BASE, dropout=0.5)
    found = train_alone(recipe, DATA)
    assert not torch.equal(found.weights["1.weight"], train_alone(BASE, DATA).weights["1.weight"])
    model = build_network(recipe, DATA.shape, DATA.classes)
    model.load_state_dict(found.weights)
    assert sum(isinstance(module, Dropout) for module in model.modules()) == 2
    inputs = DATA.test_inputs.double()
    assert torch.equal(model(inputs), model(inputs))


def test_a_network_with_draws_of_its_own_is_trained_the_same_way_twice() -> None:
    recipe = replace(BASE, network=f"training_cases:{noisy.__name__}", architecture={})
    first = train_alone(recipe, DATA).weights
    state: Tensor = torch.get_rng_state()
    again = train_alone(recipe, DATA).weights
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(again[name], value) for name, value in first.items())
