"""The grid of a study: its runs, their keys, and what cannot be a grid."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study_cases import own, study
from training_cases import examples

from saltflat.errors import DataError, OptionError, SaltflatError, StudyError
from saltflat.studies import Study
from saltflat.studies.data import DataSource
from saltflat.studies.grid import collect_axis_values, iter_grid_points, make_recipe, split_axis_names
from saltflat.studies.recipe import ADDED, SETTINGS, Recipe
from saltflat.studies.schema import ALLOWED
from saltflat.studies.training.train_batched import train_together
from saltflat.studies.training.train_one import train_alone


def refused(made: Study, *words: str, folder: Path | None = None) -> str:
    with pytest.raises(SaltflatError) as caught:
        made.runs() if folder is None else made.run(folder, progress=False)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert "Expected " in text
    assert ", but got " in text
    return text


def test_the_runs_are_every_combination_times_the_seeds_in_order() -> None:
    runs = study(axes={"lr": [0.1, 0.2], "width": [3, 4, 5]}, seeds=2).runs()
    values = [(each["lr"], each["width"], each["seed"]) for each in runs.values()]
    assert values == list(product([0.1, 0.2], [3, 4, 5], [0, 1]))
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in runs)


def test_a_configuration_has_every_setting_filled_in() -> None:
    config = next(iter(study().runs().values()))
    assert set(SETTINGS) <= set(config)
    assert config["epochs"] == 2
    assert config["momentum"] == 0.0
    assert config["depth"] == 1
    json.dumps(config, allow_nan=False)


def test_a_key_is_the_hash_of_what_determines_the_training() -> None:
    made = study(axes={"lr": [1.0]}, settings={"width": 4}, stop={"epochs": 3, "loss": 0.5}, seeds=[7])
    renamed = ("batch_size", "weight_decay")
    usual = {each: getattr(Recipe(), each) for each in SETTINGS if each not in (*renamed, *ADDED)}
    # By their first names, so that runs of earlier versions are recognized.
    config = {**usual, "network": "mlp", "widths": None, "width": 4, "depth": 2, "lr": 1, "batch": 128}
    config |= {"epochs": 3, "target_loss": 0.5, "seed": 7, "momentum": 0, "l2": 0, "weight_decay": 0, "dropout": 0}
    config |= {"init_scale": 1, "label_noise": 0, "milestones": [0.5, 0.75]}
    data = {"name": "digits", "test": None, "normalize": "none", "train_limit": 200, "test_limit": 100}
    text = json.dumps(
        {"format": 1, "data": data, "train": None, "config": config}, sort_keys=True, separators=(",", ":")
    )
    assert list(made.runs()) == [hashlib.sha256(text.encode()).hexdigest()[:16]]


@pytest.mark.parametrize("name", ADDED)
def test_later_settings_change_a_key_only_where_they_are_not_the_default(name: str) -> None:
    plain, default = study(axes={"lr": [1.0]}), getattr(Recipe(), name)
    other = {"train_subset": "random", "fisher_clip": 5.0}.get(name, 1 if isinstance(default, int) else 0.5)
    same, changed = (study(axes={"lr": [1.0], name: [value]}) for value in (default, other))
    assert list(same.runs()) == list(plain.runs()) != list(changed.runs())


def test_methods_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    made = study(axes={"sam": [0, 0.05], "asam": [0, 0.5]})
    with pytest.raises(StudyError, match=r"at most one of .* above 0, but got sam=0.05, asam=0.5 in one run"):
        made.run(tmp_path, progress=False)
    assert not list(tmp_path.rglob("*.json"))
    fine = study(axes={"sam, asam": [[0, 0], [0.05, 0], [0, 0.5]]})
    assert {row.status for row in fine.run(tmp_path, progress=False).rows.values()} == {"done"}
    with pytest.raises(OptionError, match="at most one"):
        train_alone(Recipe(sam=0.1, fisher_penalty=1.0), examples())


def test_one_and_one_point_zero_give_one_key() -> None:
    one = study(axes={"lr": [1], "width": [3.0]}, settings={"batch_size": 50.0})
    other = study(axes={"lr": [1.0], "width": [3]}, settings={"batch_size": 50})
    assert list(one.runs()) == list(other.runs())


def test_keys_do_not_depend_on_measures_the_name_or_where_the_data_are() -> None:
    other = study(
        name="other",
        measures=["rho"],
        measure={},
        together=3,
        data={"source": "digits", "train_limit": 200, "test_limit": 100, "folder": "elsewhere"},
    )
    assert list(study().runs()) == list(other.runs())


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": [1]},
        {"stop": {"epochs": 3}},
        {"stop": {"epochs": 2, "loss": 0.1}},
        {"settings": {"depth": 1, "batch_size": 40}},
        {"data": {"name": "digits", "train_limit": 201, "test_limit": 100}},
        {"data": {"name": "digits", "train_limit": 200, "test_limit": 100, "normalize": "half"}},
        {"data": {"name": "digits", "train_limit": 200, "test_limit": 100, "held_out": 50}},
    ],
)
def test_keys_depend_on_all_that_determines_the_training(change: dict[str, Any]) -> None:
    assert not set(study().runs()) & set(study(**change).runs())


def test_held_out_examples_are_tested_on_and_not_trained_on() -> None:
    whole = DataSource("digits", train_limit=200).examples()
    found = DataSource("digits", train_limit=200, held_out=50, test_limit=30).examples()
    torch.testing.assert_close(found.train_inputs, whole.train_inputs[:150])
    torch.testing.assert_close(found.test_inputs, whole.train_inputs[150:180])
    torch.testing.assert_close(found.test_labels, whole.train_labels[150:180])
    with pytest.raises(DataError, match=r"Expected at most 199, .* but got held_out=200 of 'digits'"):
        DataSource("digits", train_limit=200, held_out=200).examples()


def test_keys_of_an_own_training_depend_on_its_name() -> None:
    assert not set(own().runs()) & set(own(train="study_cases:bare").runs())


def test_a_grid_that_grows_keeps_its_keys() -> None:
    small, large = study().runs(), study(axes={"lr": [0.1, 0.2, 0.3], "width": [3, 4]}, seeds=2).runs()
    assert small.items() <= large.items()


def test_axes_may_be_tuples_ranges_and_arrays() -> None:
    made = study(axes={"lr": np.array([0.1, 0.2]), "width": range(3, 5)})
    assert made == study()
    assert list(made.runs()) == list(study().runs())


def test_a_network_can_be_an_axis() -> None:
    runs = study(axes={"network": ["mlp", "study_cases:network"]}, settings={"width": 3}).runs()
    assert [each["network"] for each in runs.values()] == ["mlp", "study_cases:network"]


def test_settings_with_commas_between_them_go_hand_in_hand() -> None:
    made = study(axes={"batch_size, lr": [[50, 0.1], [25, 0.2]], "width": [3, 4]}, settings={"depth": 1}, seeds=2)
    pairs = [(50, 0.1), (25, 0.2)]
    wanted = [(*pair, width, seed) for pair, width, seed in product(pairs, [3, 4], [0, 1])]
    assert [
        tuple(each[name] for name in ("batch_size", "lr", "width", "seed")) for each in made.runs().values()
    ] == wanted
    assert [tuple(place.values()) for place in iter_grid_points(made)] == wanted
    assert all(list(place) == ["batch_size", "lr", "width", "seed"] for place in iter_grid_points(made))
    assert collect_axis_values(made) == {"batch_size": (50, 25), "lr": (0.1, 0.2), "width": (3, 4)}
    assert made.axis_names == ["batch_size", "width"]
    assert split_axis_names(" batch_size ,lr") == ["batch_size", "lr"]
    assert split_axis_names("lr") == ["lr"]
    assert Study.from_dict(made.to_dict()) == made


def test_keys_do_not_depend_on_what_goes_hand_in_hand() -> None:
    apart = study(axes={"batch_size": [50, 25], "lr": [0.1, 0.2]}, settings={"depth": 1}).runs()
    together = study(axes={"batch_size, lr": [[50, 0.1], [25, 0.2]]}, settings={"depth": 1}).runs()
    assert together.items() <= apart.items()


def test_a_value_that_goes_hand_in_hand_may_be_a_list_and_may_come_back() -> None:
    runs = study(axes={"widths, lr": [[[3, 2], 0.1], [[4], 0.1]]}, settings={}).runs()
    assert [(each["widths"], each["lr"]) for each in runs.values()] == [([3, 2], 0.1), ([4], 0.1)]


def test_a_network_can_go_hand_in_hand() -> None:
    axes = {"network, width": [["mlp", 3], ["study_cases:network", 4]]}
    runs = study(axes=axes, settings={}).runs()
    assert [(each["network"], each["width"]) for each in runs.values()] == [("mlp", 3), ("study_cases:network", 4)]
    with pytest.raises(StudyError, match="'network' in axes and beside them"):
        study(axes=axes, settings={}, network="mlp")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"batch_size, lr": [[50, 0.1], 25]}, ("got 25 in the axis 'batch_size, lr'", "2 values in a list")),
        ({"batch_size, lr": [[50, 0.1], [25]]}, ("got [25] in the axis",)),
        ({"batch_size, lr": [[50, 0.1, 3]]}, ("got [50, 0.1, 3] in the axis",)),
        ({"batch_size, lr": []}, ("without values",)),
        ({"batch_size, lr": [[50, 1], [50, 1.0]]}, ("twice",)),
        ({"batch_size, lr": [[50, 0.1]], "lr": [0.1]}, ("got 'lr' in more than one axis",)),
        ({"lr, lr": [[0.1, 0.2]]}, ("got 'lr' in more than one axis",)),
        ({"lr, seed": [[0.1, 1]]}, ("axis 'seed'", "seeds")),
        ({"lr, epochs": [[0.1, 1]]}, ("'epochs' in axes and in stop",)),
        ({"lr, depth": [[0.1, 1]]}, ("'depth' in axes and in settings",)),
        ({"batch_size, lr": [[50, -0.1]]}, ("lr=-0.1", "above 0")),
        ({"batch_size, momentun": [[50, 0.9]]}, ("'momentun'", "Try 'momentum'")),
        ({"batch_size,": [[50, 1]]}, ("''",)),
    ],
)
def test_settings_that_cannot_go_hand_in_hand_are_refused(axes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(study(axes=axes, settings={"depth": 1}), *words)


def test_functions_may_be_handed_over_themselves() -> None:
    import study_cases

    assert own(train=study_cases.train) == own()
    assert study(data=study_cases.pairs, network=study_cases.network).data.name == "study_cases:pairs"
    with pytest.raises(StudyError, match="top of a module"):
        study(train=lambda: None)


def test_every_setting_of_a_recipe_is_checked() -> None:
    assert set(ALLOWED) | {"network"} == set(SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("momentum", 2), ("lr", 0), ("target_loss", -1), ("init_scale", -1), ("target_error", 5), ("eps", 0),
        ("seed", -5), ("milestones", (7,)), ("sam", -0.1), ("gradient_norm_balance", 1.5), ("fisher_parts", 0),
        ("fisher_clip", 0), ("label_smoothing", 1), ("warmup", -1), ("patience", -1), ("decoupled_weight_decay", -1),
    ],
)  # fmt: skip
def test_a_study_and_a_recipe_have_one_schema(name: str, value: Any) -> None:
    if name == "seed":
        refused(study(seeds=[value]), "seed=-5")
    else:
        refused(study(axes={"width": [3]}, settings={name: value}), f"got {name}=")
        refused(study(axes={name: [value]}), name)
    recipe = Recipe(**{name: value}, epochs=1)
    for train in (train_alone, lambda recipe, data: train_together([Recipe(epochs=1), recipe], data)):
        with pytest.raises(OptionError, match=rf"^Expected .*, but got {name}={re.escape(repr(value))}"):
            train(recipe, examples())


@pytest.mark.parametrize(("old", "new"), [("batch", "batch_size"), ("l2", "weight_decay")])
def test_the_names_of_earlier_versions_are_refused_with_the_new_ones(old: str, new: str, tmp_path: Path) -> None:
    told = f"Expected the setting '{new}', as in torch, but got '{old}'. Try {new}."
    for made in (study(settings={old: 1}), study(axes={old: [1, 2]}), study(axes={f"{old}, lr": [[1, 0.1]]})):
        refused(made, told)
    refused(study(network="study_cases:anything", axes={"lr": [0.1]}, settings={old: 1}), told)
    given: dict[str, Any] = {old: 1}
    for make in (Recipe, partial(replace, Recipe()), lambda **settings: make_recipe(settings)):
        with pytest.raises(OptionError, match=re.escape(told)):
            make(**given)
    path = tmp_path / "study.yaml"
    path.write_text(f"name: small\ndata: digits\naxes: {{lr: [0.1]}}\nsettings: {{{old}: 1}}\nstop: {{epochs: 1}}\n")
    refused(Study.from_file(path), told)


def test_a_train_function_may_have_the_names_of_earlier_versions() -> None:
    made = own(train="study_cases:old_names", axes={"batch": [1, 2]}, settings={"l2": 0.5})
    assert [(each["batch"], each["l2"]) for each in made.runs().values()] == [(1, 0.5), (2, 0.5)]


def test_adam_and_adamw_are_two_runs_with_and_without_weight_decay() -> None:
    made = study(axes={"optimizer": ["sgd", "adam", "adamw"], "weight_decay": [0, 0.1]})
    assert len(made.runs()) == 6


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"lr": []}, ("'lr'", "without values")),
        ({"lr": [1, 1.0]}, ("1.0 twice", "'lr'")),
        ({"widths": [[8, 8], [8.0, 8]]}, ("twice",)),
        ({"lr": [0.1, -0.1]}, ("lr=-0.1", "above 0")),
        ({"lr": ["fast"]}, ("lr='fast'",)),
        ({"lr": [True]}, ("lr=True",)),
        ({"batch_size": [0]}, ("batch_size=0", "whole number from 1")),
        ({"batch_size": [2.5]}, ("batch_size=2.5",)),
        ({"label_noise": [1.5]}, ("label_noise=1.5", "from 0 to 1")),
        ({"dropout": [1.0]}, ("dropout=1.0",)),
        ({"nesterov": [1]}, ("nesterov=1", "true or false")),
        ({"milestones": [[0.5, 2]]}, ("milestones",)),
        ({"target_loss": [-1]}, ("target_loss=-1",)),
        ({"optimizer": ["sdg"]}, ("'sdg'", "Try 'sgd'")),
        ({"schedule": ["cosin"]}, ("Try 'cosine'",)),
        ({"init": ["xavier_norm"]}, ("Try 'xavier_normal'",)),
        ({"augment": ["flipp"]}, ("Try 'flip'",)),
        ({"dtype": ["float16"]}, ("'float16'",)),
        ({"seed": [1, 2]}, ("axis 'seed'", "seeds")),
        ({"network": ["mpl"]}, ("'mpl'", "Try 'mlp'")),
        ({"network": [3]}, ("'3'",)),
        ({"widht": [3]}, ("'widht'", "Try 'width'")),
        ({"momentun": [0.9]}, ("'momentun'", "Try 'momentum'")),
        ({"learning_rate": [0.9]}, ("Expected 'lr', but got 'learning_rate'",)),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(axes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(study(axes=axes, settings={}), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"axes": {"lr": [0.1]}, "settings": {"lr": 0.2}}, ("axes and in settings",)),
        ({"axes": {"epochs": [1, 2]}}, ("axes and in stop",)),
        ({"settings": {"epochs": 3}}, ("settings and in stop",)),
        ({"settings": {"seed": 3}}, ("seeds",)),
        ({"settings": {"network": "mlp"}}, ("network",)),
        ({"seeds": []}, ("no seeds",)),
        ({"seeds": 0}, ("no seeds",)),
        ({"seeds": [1, 1]}, ("seed twice",)),
        ({"seeds": [-1]}, ("seed=-1",)),
        ({"seeds": [2**64]}, ("seed=",)),
        ({"stop": {"epochs": -1}}, ("epochs=-1",)),
        (
            {"axes": {"lr": list(np.linspace(0.1, 1, 400)), "weight_decay": list(np.linspace(0, 1, 300))}},
            ("120,000", "100,000"),
        ),
    ],
)
def test_a_study_whose_parts_do_not_fit_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(study(**changes), *words)


def test_all_problems_are_told_at_once() -> None:
    text = refused(study(axes={"lr": [-1], "batch_size": [0], "widht": [3]}, settings={"optimizer": "adm"}))
    for word in ("4 problems", "lr=-1", "batch_size=0", "'widht'", "'adm'"):
        assert word in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"batch_size": 201}}, ("batch_size=201", "200, the number of training examples")),
        ({"settings": {"train_size": 201, "batch_size": 5}}, ("train_size=201", "200")),
        ({"settings": {"train_size": 190, "confusion": 20}}, ("confusion=20",)),
        ({"settings": {"nesterov": True}}, ("nesterov",)),
        ({"network": "lenet5", "axes": {"lr": [0.1]}, "data": "study_cases:pairs", "settings": {}}, ("lenet5", "(6,)")),
        ({"axes": {"width": [-3]}}, ("width=-3",)),
        ({"network": "study_cases:broken_network", "settings": {}}, ("no network today",)),
        ({"network": "study_cases:two_outputs", "axes": {"lr": [0.1]}, "settings": {}}, ("(2, 2)", "(2, 10)")),
        ({"measure": {"layers": ["nowhere"]}}, ("nowhere",)),
        ({"settings": {"augment": "flip"}, "data": "study_cases:pairs"}, ("augment='flip'", "images")),
        (
            {"network": "study_cases:normalized", "settings": {"batch_size": 199}, "axes": {"lr": [0.1]}},
            ("single example",),
        ),
        ({"network": "study_cases:torch"}, ("a module", "a function")),
        ({"data": "study_cases:unequal_pairs"}, ("(6,)", "(5,)")),
        ({"data": "study_cases:short_pairs"}, ("bfloat16", "float32")),
    ],
)
def test_what_the_data_do_not_allow_is_refused_before_any_work(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    refused(study(**changes), *words, folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_argument_that_one_of_two_networks_does_not_take_is_refused() -> None:
    refused(study(axes={"network": ["mlp", "study_cases:network"]}), "depth", "study_cases:network")


def test_a_train_function_is_asked_what_it_takes() -> None:
    refused(own(axes={"widht": [2]}), "'widht'", "Try 'width'")
    refused(own(settings={"lr": 0.1}), "'lr'")
    refused(own(train="study_cases:needing", stop={}), "'patience'", "needs")
    refused(own(train="study_cases:trane"), "Try 'trained'")
    refused(own(train="study_cases:closed"), "'width' by its name")
    refused(own(network="study_cases:netwrok"), "Try 'network'")
    refused(own(train="study_cases:needing", settings={"patience": 1}), "'epochs'")


def test_defaults_of_a_train_function_are_part_of_its_runs() -> None:
    runs = own(train="study_cases:bare", axes={"epochs": [1, 2]}, stop={}).runs()
    assert [each["width"] for each in runs.values()] == [2, 2]


@pytest.mark.parametrize("settings", [{"width": 0}, {"depth": -1}, {"widths": [8, 0]}])
def test_layers_without_units_are_refused_before_any_work(settings: dict[str, Any], tmp_path: Path) -> None:
    study = Study("none", "digits", {"lr": [0.1]}, settings=settings, stop={"epochs": 1})
    with pytest.raises(StudyError, match=r"layers of at least one unit.*width"):
        study.run(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_plateau_must_lower_the_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"decay below 1 with schedule='plateau'.* got decay=2"):
        study(settings={"schedule": "plateau", "decay": 2, "depth": 1}).run(tmp_path, progress=False)
    with pytest.raises(OptionError, match="decay below 1"):
        train_alone(Recipe(schedule="plateau", decay=1.0), examples())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup": 3.0, "epochs": 2}, r"warmup of at most the number of epochs, but got warmup=3.0 with epochs=2"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16'. Try 'bf16'."),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SaltflatError, match=said):
        train_alone(Recipe(**settings), examples())


def test_an_argument_that_is_also_a_setting_is_refused_where_it_is_given() -> None:
    made = study(network="study_cases:clashing", axes={"warmup": [1, 2]}, settings={})
    refused(made, "'warmup', which is a setting of training and an argument of the network 'study_cases:clashing'")
    assert len(study(network="study_cases:clashing", axes={"lr": [0.1]}, settings={}).runs()) > 0
