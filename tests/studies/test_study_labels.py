"""Random labels and confusion sets, as the papers define them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training_cases import examples

from saltflat.errors import DataError, UnknownNameError
from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.training.examples import make_training_set

MANY = examples((2,), train=1000, test=10, classes=10)


def test_without_noise_labels_are_what_they_were() -> None:
    found = make_training_set(Recipe(), MANY)
    assert torch.equal(found.labels, MANY.train_labels)
    assert torch.equal(found.inputs, MANY.train_inputs)
    assert found.measured == 1000


def test_permuted_labels_change_places_among_a_share_of_the_examples() -> None:
    found = make_training_set(Recipe(label_noise=0.3), MANY).labels
    changed = (found != MANY.train_labels).sum()
    # 300 labels of 10 classes change places: about a tenth stay right by chance.
    assert 240 <= changed <= 300
    assert torch.equal(found.bincount(), MANY.train_labels.bincount())


def test_uniform_labels_are_drawn_anew_for_a_share_of_the_examples() -> None:
    found = make_training_set(Recipe(label_noise=1.0, label_noise_kind="uniform"), MANY).labels
    agree = (found == MANY.train_labels).sum()
    assert 60 <= agree <= 145  # a tenth, within four deviations
    assert not torch.equal(found.bincount(minlength=10), MANY.train_labels.bincount())
    half = make_training_set(Recipe(label_noise=0.5, label_noise_kind="uniform"), MANY).labels
    assert 400 <= (half != MANY.train_labels).sum() <= 500


@pytest.mark.parametrize(("share", "count"), [(0.29, 29), (0.3, 30), (0.015, 1), (0.0, 0), (1.0, 100)])
def test_the_share_is_rounded_down_but_not_by_rounding_errors(share: float, count: int) -> None:
    labels = torch.arange(100)  # all different, so that a label that moved can be seen
    data = Examples(torch.zeros(100, 1), labels, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    moved = [
        int((make_training_set(Recipe(seed=seed, label_noise=share), data).labels != labels).sum())
        for seed in range(30)
    ]
    # A permutation may leave some in place; among thirty, one leaves none (or, with one label, all leave it).
    assert max(moved) == (count if count != 1 else 0)


def test_more_noise_adds_to_less() -> None:
    def touched(share: float) -> set[int]:
        labels = torch.arange(1000)
        data = Examples(torch.zeros(1000, 1), labels, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
        found = make_training_set(Recipe(label_noise=share, label_noise_kind="uniform"), data).labels
        return set((found != labels).nonzero().flatten().tolist())

    # A label drawn anew may be the old one, which a few of a thousand classes are.
    assert len(touched(0.2) - touched(0.6)) <= 3
    assert len(touched(0.2)) < len(touched(0.6))


def test_labels_depend_on_the_seed_and_the_noise_alone() -> None:
    base = Recipe(label_noise=0.4, confusion=50, train_size=500)
    labels = make_training_set(base, MANY).labels
    others = replace(base, lr=0.7, network="lenet5", epochs=3, dropout=0.2, init="normal", batch_size=7)
    assert torch.equal(make_training_set(others, MANY).labels, labels)
    assert not torch.equal(make_training_set(replace(base, seed=1), MANY).labels, labels)


def test_the_confusion_set_is_behind_the_measured_examples_and_has_random_labels() -> None:
    found = make_training_set(Recipe(train_size=400, confusion=500), MANY)
    assert found.measured == 400
    assert len(found.labels) == len(found.inputs) == 900
    assert torch.equal(found.labels[:400], MANY.train_labels[:400])
    assert torch.equal(found.inputs, MANY.train_inputs[:900])
    agree = (found.labels[400:] == MANY.train_labels[400:900]).sum()
    assert 20 <= agree <= 85  # a tenth of 500
    # Where no size is given, all examples but those of the confusion set are measured.
    assert make_training_set(Recipe(confusion=300), MANY).measured == 700


def test_the_users_labels_are_not_touched() -> None:
    before = MANY.train_labels.clone()
    make_training_set(Recipe(label_noise=1.0), MANY)
    make_training_set(Recipe(train_size=10, confusion=20), MANY)
    assert torch.equal(MANY.train_labels, before)


@pytest.mark.parametrize("settings", [{"train_size": 1001}, {"train_size": 990, "confusion": 11}, {"confusion": 1000}])
def test_more_examples_than_there_are_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"Expected .*, but got .* Try "):
        make_training_set(Recipe(**settings), MANY)  # type: ignore[arg-type]


def test_an_unknown_kind_of_noise_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Try 'permuted'"):
        make_training_set(Recipe(label_noise_kind="permute"), MANY)
