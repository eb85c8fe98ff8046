"""A study run to its end: rows, weights, tables; what fails, what is kept, what is done again."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file
from study_cases import Told, own, study
from torch.testing import assert_close

import saltflat
from saltflat.errors import SaltflatError, StudyError
from saltflat.studies import Results, Row, tasks
from saltflat.studies.executors import ProcessExecutor
from saltflat.studies.grid import make_recipe
from saltflat.studies.results import format_csv
from saltflat.studies.row import Outcome, TrainedNetwork
from saltflat.studies.runner import LineDisplay, StudyRunner
from saltflat.studies.store.folder import Store
from saltflat.studies.store.rows import row_from_dict, row_to_dict
from saltflat.studies.training.build import build_network
from saltflat.studies.training.examples import make_training_set


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return study().run(tmp_path_factory.mktemp("study") / "runs", progress=False)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The keys that are trained and measured."""
    found: dict[str, list[str]] = {"train": [], "measure": []}
    train, measure = tasks.train_group, tasks.measure_run

    def training(task: Any, context: Any) -> Any:
        found["train"] += task.configs
        return train(task, context)

    def measuring(task: Any, context: Any) -> Any:
        found["measure"].append(task.key)
        return measure(task, context)

    monkeypatch.setattr(tasks, "train_group", training)
    monkeypatch.setattr(tasks, "measure_run", measuring)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_run_has_a_row_and_weights_named_by_its_key(finished: Results) -> None:
    keys = list(study().runs())
    assert list(finished.rows) == keys
    assert sorted(path.stem for path in (finished.folder / "rows").iterdir()) == sorted(keys)
    assert sorted(path.stem for path in (finished.folder / "weights").iterdir()) == sorted(keys)
    assert list((finished.folder / "partial").iterdir()) == []
    assert finished.counts == {"done": 4, "missed": 0, "diverged": 0, "failed": 0, "missing": 0}


def test_what_a_row_says_is_true_of_the_weights(finished: Results) -> None:
    examples = study().data.examples()
    for key, row in finished.rows.items():
        assert row.outcome is not None
        recipe = make_recipe(row.config)
        model = build_network(recipe, examples.shape, examples.classes)
        before = torch.cat([each.detach().flatten() for each in model.parameters()]).double()
        model.load_state_dict(load_file(finished.folder / "weights" / f"{key}.safetensors"))
        after = torch.cat([each.detach().flatten() for each in model.parameters()]).double()
        with torch.no_grad():
            outputs = model(examples.test_inputs).double()
        loss = torch.nn.functional.cross_entropy(outputs, examples.test_labels)
        assert row.outcome.test_loss == pytest.approx(float(loss), rel=1e-5)
        assert row.outcome.test_error == pytest.approx(
            float((outputs.argmax(1) != examples.test_labels).double().mean())
        )
        weights = [each.detach().double() for name, each in model.named_parameters() if "weight" in name]
        squares = sum(float(each.square().sum()) for each in weights)
        assert row.readings["squared_norm"].value == pytest.approx(squares, rel=1e-12)
        assert row.readings["distance_from_init"].value == pytest.approx(float((after - before).norm()), rel=1e-12)
        again = saltflat.measure(
            model.double(),
            (examples.train_inputs[:30].double(), examples.train_labels[:30]),
            measures=["hessian_trace"],
            certificate=False,
        )
        assert row.readings["hessian_trace"].value == pytest.approx(again["hessian_trace"].value, rel=1e-12)


def test_measures_are_taken_with_the_labels_that_were_trained_on(tmp_path: Path) -> None:
    made = study(
        axes={"lr": [0.1]},
        settings={"depth": 1, "width": 3, "label_noise": 1.0, "train_size": 40, "confusion": 20, "batch_size": 20},
        measures=["fisher_trace"],
        measure={"examples": None},
    )
    (row,) = made.run(tmp_path / "runs", progress=False).rows.values()
    examples = made.data.examples()
    recipe = make_recipe(row.config)
    data = make_training_set(recipe, examples)
    assert data.measured == 40
    assert not torch.equal(data.labels[:40], examples.train_labels[:40])
    model = build_network(recipe, examples.shape, examples.classes).double()
    model.load_state_dict(load_file(tmp_path / "runs" / "weights" / f"{row.key}.safetensors"))
    total = 0.0
    for image, label in zip(data.inputs[:40].double(), data.labels[:40], strict=True):
        loss = torch.nn.functional.cross_entropy(model(image[None]), label[None])
        total += sum(float(each.square().sum()) for each in torch.autograd.grad(loss, list(model.parameters())))
    assert row.readings["fisher_trace"].value == pytest.approx(total / 40, rel=1e-9)


def test_weights_carry_their_outcome(finished: Results) -> None:
    key, row = next(iter(finished.rows.items()))
    with safe_open(str(finished.folder / "weights" / f"{key}.safetensors"), framework="pt") as file:
        metadata = file.metadata()
    assert metadata["key"] == key
    assert json.loads(metadata["config"]) == row.config
    assert row.outcome is not None
    assert json.loads(metadata["outcome"])["train_loss"] == row.outcome.train_loss


def test_rows_come_back_from_their_files(finished: Results) -> None:
    for row in finished.rows.values():
        assert row_from_dict(json.loads(json.dumps(row_to_dict(row), allow_nan=False))) == row
        odd = replace(row, seconds={"training": math.inf}, failure={"error": "$x", "traceback": ""})
        assert row_from_dict(json.loads(json.dumps(row_to_dict(odd), allow_nan=False))) == odd


@pytest.mark.parametrize("broken", ["key", "status", "outcome", "readings", "seconds"])
def test_a_row_that_was_changed_is_not_understood(finished: Results, broken: str) -> None:
    given = row_to_dict(next(iter(finished.rows.values())))
    without = {name: value for name, value in given.items() if name != broken}
    for wrong in (without, {**given, broken: 3}):
        if broken == "key" and wrong is not without:
            continue  # any text or number is a key here; the store compares it with the file's name
        with pytest.raises(StudyError, match="cannot be understood"):
            row_from_dict(wrong)


def test_the_table_has_every_number_in_full(finished: Results) -> None:
    with (finished.folder / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["key"] for line in lines] == list(finished.rows)
    assert list(lines[0])[:5] == ["key", "lr", "width", "seed", "status"]
    for line, row in zip(lines, finished.rows.values(), strict=True):
        assert row.outcome is not None
        assert float(line["train_loss"]) == row.outcome.train_loss
        assert float(line["gap_error"]) == row.gap["error"]
        assert float(line["hessian_trace"]) == row.readings["hessian_trace"].value
    assert not [name for name in lines[0] if "second" in name]


def test_a_frame_has_the_table(finished: Results) -> None:
    frame = finished.to_frame()
    assert list(frame["key"]) == list(finished.rows)
    assert_close(frame["lr"].to_list(), [0.1, 0.1, 0.2, 0.2])


def test_a_finished_study_is_not_done_again(finished: Results, work: dict[str, list[str]]) -> None:
    before = contents(finished.folder)
    again = study().run(finished.folder, progress=False)
    assert work == {"train": [], "measure": []}
    assert {name: text for name, text in contents(finished.folder).items() if name != ".lock"} == {
        name: text for name, text in before.items() if name != ".lock"
    }
    assert again.rows == finished.rows


def test_two_folders_have_the_same_table(finished: Results, tmp_path: Path) -> None:
    study().run(tmp_path / "runs", progress=False)
    assert (tmp_path / "runs" / "table.csv").read_bytes() == (finished.folder / "table.csv").read_bytes()


def test_processes_give_the_same_table(finished: Results, tmp_path: Path) -> None:
    study().run(tmp_path / "runs", ProcessExecutor(workers=1), progress=False)
    assert (tmp_path / "runs" / "table.csv").read_bytes() == (finished.folder / "table.csv").read_bytes()


def test_asking_for_more_measures_trains_nothing(tmp_path: Path, work: dict[str, list[str]]) -> None:
    before = study(measures=["squared_norm", "hessian_trace"]).run(tmp_path / "runs", progress=False)
    assert len(work["train"]) == 4
    work["train"].clear()
    after = study(measures=["rho", "hessian_trace"]).run(tmp_path / "runs", progress=False)
    assert work["train"] == []
    assert len(work["measure"]) == 8
    for key, row in after.rows.items():
        assert row.readings.keys() == {"squared_norm", "hessian_trace", "rho"}
        assert row.readings["hessian_trace"] == before.rows[key].readings["hessian_trace"]
    assert "squared_norm" not in after.table()[0]
    fresh = study(measures=["rho", "hessian_trace"]).run(tmp_path / "fresh", progress=False)
    assert fresh.csv() == after.csv()


def test_asking_for_other_examples_measures_again(tmp_path: Path, work: dict[str, list[str]]) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    after = study(measure={"examples": 60}).run(tmp_path / "runs", progress=False)
    assert len(work["train"]) == 4
    assert len(work["measure"]) == 8
    for key, row in after.rows.items():
        assert row.measured["examples"] == 60
        assert row.readings["hessian_trace"].value != before.rows[key].readings["hessian_trace"].value


def test_rows_without_weights_are_kept_and_said_to_lack_measures(tmp_path: Path, work: dict[str, list[str]]) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    for path in (tmp_path / "runs" / "weights").iterdir():
        path.unlink()
    told = Told()
    after = study(measures=["rho", *study().measures]).run(tmp_path / "runs", progress=told)
    assert after.rows == before.rows
    assert len(work["train"]) == 4
    assert any("4 runs lack measures" in text for text in told.texts)
    assert after.table()[0]["rho"] is None


def test_a_grid_that_grows_runs_only_what_is_new(tmp_path: Path, work: dict[str, list[str]]) -> None:
    before = study(axes={"lr": [0.1], "width": [3, 4]}).run(tmp_path / "runs", progress=False)
    work["train"].clear()
    after = study().run(tmp_path / "runs", progress=False)
    assert set(work["train"]) == set(after.rows) - set(before.rows)
    assert all(after.rows[key] == row for key, row in before.rows.items())
    told = Told()
    smaller = study(axes={"lr": [0.2], "width": [3]}).run(tmp_path / "runs", progress=told)
    assert len(smaller.rows) == 1
    assert len(list((tmp_path / "runs" / "rows").iterdir())) == 4
    assert any("3 runs of an earlier definition are kept" in text for text in told.texts)


def test_a_folder_of_another_study_is_refused(finished: Results) -> None:
    with pytest.raises(StudyError, match=r"holds the study 'small'.*--out"):
        study(name="other").run(finished.folder, progress=False)


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StudyError, match=r"thesis\.txt"):
        study().run(tmp_path, progress=False)
    assert list(contents(tmp_path)) == ["thesis.txt"]
    with pytest.raises(StudyError, match="is a file"):
        study().run(tmp_path / "thesis.txt", progress=False)


def test_data_that_changed_under_the_same_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = study(data="study_cases:pairs", settings={"depth": 1, "batch_size": 10})
    made.run(tmp_path / "runs", progress=False)
    monkeypatch.setenv("STUDY_BLOBS", "1")
    with pytest.raises(StudyError, match="not those which the runs"):
        made.run(tmp_path / "runs", progress=False)


def test_a_damaged_row_is_told_set_aside_and_made_again(tmp_path: Path, work: dict[str, list[str]]) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    table = (tmp_path / "runs" / "table.csv").read_bytes()
    key = list(before.rows)[1]
    path = tmp_path / "runs" / "rows" / f"{key}.json"
    path.write_bytes(path.read_bytes()[:100])
    assert any("damaged" in note for note in Results.load(tmp_path / "runs").notes)
    assert path.exists()  # whoever only looks changes nothing
    work["measure"].clear()
    told = Told()
    study().run(tmp_path / "runs", progress=told)
    assert work["measure"] == [key]
    assert len(work["train"]) == 4
    assert path.with_name(f"{key}.json.damaged").exists()
    assert any("set aside" in text for text in told.texts)
    assert (tmp_path / "runs" / "table.csv").read_bytes() == table


def test_a_row_under_another_name_is_set_aside(tmp_path: Path) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    one, other, *_ = (tmp_path / "runs" / "rows" / f"{key}.json" for key in before.rows)
    one.write_bytes(other.read_bytes())
    told = Told()
    assert study().run(tmp_path / "runs", progress=told).csv() == before.csv()
    assert len(told.texts) == 1


def test_damaged_weights_are_told_set_aside_and_trained_again(tmp_path: Path, work: dict[str, list[str]]) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    key = list(before.rows)[2]
    path = tmp_path / "runs" / "weights" / f"{key}.safetensors"
    weights = load(path.read_bytes())
    others = {name: text for name, text in contents(path.parent).items() if name != path.name}
    path.write_bytes(path.read_bytes()[:-10])
    work["train"].clear()
    told = Told()
    after = study().run(tmp_path / "runs", progress=told)
    # With its group, so that it comes out bit for bit as it was; the file of the other run is left alone.
    assert set(work["train"]) == {
        each for each, row in before.rows.items() if row.config["width"] == before.rows[key].config["width"]
    }
    assert {name: text for name, text in contents(path.parent).items() if name != path.name}.items() >= others.items()
    assert path.with_name(f"{key}.safetensors.damaged").exists()
    assert_close(load(path.read_bytes()), weights, rtol=0, atol=0)
    assert after.csv() == before.csv()
    assert any("set aside" in text for text in told.texts)


def test_a_damaged_definition_is_set_aside(tmp_path: Path, work: dict[str, list[str]]) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    (tmp_path / "runs" / "study.json").write_text("{")
    told = Told()
    assert study().run(tmp_path / "runs", progress=told).csv() == before.csv()
    assert len(work["train"]) == 4
    assert (tmp_path / "runs" / "study.json.damaged").exists()


def test_a_group_that_was_not_finished_is_trained_whole_again(tmp_path: Path, work: dict[str, list[str]]) -> None:
    made = study(axes={"lr": [0.1, 0.2]}, settings={"depth": 1, "width": 3}, seeds=2)
    before = made.run(tmp_path / "runs", progress=False)
    keys = list(before.rows)
    rows, weights = tmp_path / "runs" / "rows", tmp_path / "runs" / "weights"
    for path in rows.iterdir():
        path.unlink()
    (weights / f"{keys[1]}.safetensors").unlink()
    kept = contents(weights)
    work["train"].clear()
    assert made.run(tmp_path / "runs", progress=False).csv() == before.csv()
    assert work["train"] == keys  # as many at once as without interruption: the same numbers, whatever adds them up
    assert kept.items() <= contents(weights).items()
    (rows / f"{keys[1]}.json").unlink()
    (weights / f"{keys[1]}.safetensors").unlink()
    work["train"].clear()
    made.run(tmp_path / "runs", progress=False)
    assert work["train"] == [keys[1]]  # the others are finished


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    study().run(tmp_path / "runs", progress=False)
    for place in ("", "rows", "weights", "partial"):
        (tmp_path / "runs" / place / ".0123.part").write_text("half of a fi")
    (tmp_path / "runs" / "partial" / "0123456789abcdef.safetensors").write_text("of a group that is no more")
    study().run(tmp_path / "runs", progress=False)
    assert [name for name in contents(tmp_path / "runs") if name.endswith(".part") or "partial" in name] == []


def test_a_train_function_of_the_users_own_trains(tmp_path: Path, work: dict[str, list[str]]) -> None:
    results = own().run(tmp_path / "runs", progress=False)
    assert results.counts["done"] == 2
    for row in results.rows.values():
        assert row.outcome is not None
        assert row.outcome.distance == pytest.approx(row.readings["distance_from_init"].value, rel=1e-5)
        assert row.outcome.epochs == 1
    assert own().run(tmp_path / "other", progress=False).csv() == results.csv()
    more = own(measures=["rho", "squared_norm"]).run(tmp_path / "runs", progress=False)
    assert len(work["train"]) == 4
    assert all(math.isfinite(row.readings["rho"].value) for row in more.rows.values())


def test_an_own_training_without_its_network_is_measured_at_once(tmp_path: Path, work: dict[str, list[str]]) -> None:
    made = own(train="study_cases:bare", network=None, measures=["squared_norm", "distance_from_init"])
    results = made.run(tmp_path / "runs", progress=False)
    assert results.counts["done"] == 2
    key, row = next(iter(results.rows.items()))
    weights = load_file(tmp_path / "runs" / "weights" / f"{key}.safetensors")
    squares = sum(float(weights[name].double().square().sum()) for name in ("inner.weight", "outer.weight"))
    assert row.readings["squared_norm"].value == pytest.approx(squares, rel=1e-12)
    assert math.isnan(row.readings["distance_from_init"].value)
    assert row.readings["distance_from_init"].notes
    told = Told()
    own(train="study_cases:bare", network=None, measures=["rho"]).run(tmp_path / "runs", progress=told)
    assert any("lack measures" in text and "network" in text for text in told.texts)
    assert work["measure"] == []
    assert len(work["train"]) == 2


def test_weights_of_an_own_training_belong_to_its_row(tmp_path: Path) -> None:
    made = own(train="study_cases:bare", network=None)
    before = made.run(tmp_path / "runs", progress=False)
    key = next(iter(before.rows))
    (tmp_path / "runs" / "rows" / f"{key}.json").unlink()
    assert made.run(tmp_path / "runs", progress=False).csv() == before.csv()


def test_a_train_function_that_raises_fails_its_run_and_no_other(
    tmp_path: Path, work: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = own(train="study_cases:failing")
    results = made.run(tmp_path / "runs", progress=False)
    assert results.counts == {"done": 1, "missed": 0, "diverged": 0, "failed": 1, "missing": 0}
    (row,) = [row for row in results.rows.values() if row.status == "failed"]
    assert row.failure is not None
    assert row.failure["error"] == "ZeroDivisionError: a width of 3"
    assert "study_cases.py" in row.failure["traceback"]
    assert row.gap == {}
    assert "1 x ZeroDivisionError" in str(results)
    made.run(tmp_path / "runs", progress=False)
    assert len(work["train"]) == 2
    monkeypatch.setenv("STUDY_HEALED", "1")
    assert made.run(tmp_path / "runs", retry_failed=True, progress=False).counts["done"] == 2
    assert work["train"][2:] == [row.key]


@pytest.mark.parametrize(("name", "word"), [("leaving", "sys.exit(5)"), ("no_model", "torch.nn.Module")])
def test_a_train_function_that_gives_no_model_fails_its_runs(name: str, word: str, tmp_path: Path) -> None:
    results = own(train=f"study_cases:{name}").run(tmp_path / "runs", progress=False)
    assert results.counts["failed"] == 2
    assert all(row.failure is not None and word in row.failure["error"] for row in results.rows.values())


def test_nan_weights_make_a_diverged_row(tmp_path: Path, work: dict[str, list[str]]) -> None:
    results = own(train="study_cases:exploding").run(tmp_path / "runs", progress=False)
    assert results.counts["diverged"] == 1
    (row,) = [row for row in results.rows.values() if row.status == "diverged"]
    assert row.readings == {}
    assert row.outcome is not None
    assert any("nothing was measured" in note for note in row.outcome.notes)
    assert work["measure"] == [key for key in results.rows if key != row.key]


def test_a_learning_rate_that_blows_up_makes_a_diverged_row(tmp_path: Path) -> None:
    results = study(axes={"lr": [1e-3, 1e30]}, settings={"depth": 1, "width": 3}).run(tmp_path / "runs", progress=False)
    assert [row.status for row in results.rows.values()] == ["done", "diverged"]
    line = results.table()[1]
    assert math.isnan(line["train_loss"])
    assert line["hessian_trace"] is None
    assert results.csv().splitlines()[2].split(",")[5] == "nan"


def test_a_kill_between_weights_and_the_row_of_a_diverged_run_is_no_harm(tmp_path: Path) -> None:
    made = study(axes={"lr": [1e-3, 1e30]}, settings={"depth": 1, "width": 3})
    before = made.run(tmp_path / "runs", progress=False)
    for path in (tmp_path / "runs" / "rows").iterdir():
        path.unlink()
    after = made.run(tmp_path / "runs", progress=False)
    assert after.csv() == before.csv()
    assert [row.status for row in after.rows.values()] == ["done", "diverged"]


def test_runs_that_miss_the_stopping_rule_are_kept_and_flagged(tmp_path: Path) -> None:
    results = study(stop={"epochs": 1, "loss": 1e-6}).run(tmp_path / "runs", progress=False)
    assert results.counts["missed"] == 4
    assert all(row.readings for row in results.rows.values())
    assert "4 missed" in str(results)


def test_an_error_in_measuring_keeps_the_weights_and_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: dict[str, list[str]]
) -> None:
    measure = tasks.measure_run

    def careless(task: Any, context: Any) -> Any:
        if task.config["lr"] == 0.2:
            raise LookupError("a page is missing")
        return measure(task, context)

    monkeypatch.setattr(tasks, "measure_run", careless)
    results = study().run(tmp_path / "runs", progress=False)
    assert results.counts["failed"] == 2
    failed = [row for row in results.rows.values() if row.status == "failed"]
    assert all(row.failure is not None and "careless" in row.failure["traceback"] for row in failed)
    assert all(row.outcome is not None for row in failed)
    monkeypatch.setattr(tasks, "measure_run", measure)
    trained = len(work["train"])
    assert study().run(tmp_path / "runs", retry_failed=True, progress=False).counts["done"] == 4
    assert len(work["train"]) == trained


def test_a_measure_that_a_network_does_not_allow_is_nan_and_the_others_go_on(tmp_path: Path) -> None:
    made = study(
        axes={"lr": [0.1]},
        network="study_cases:once",
        settings={},
        measures=["squared_norm", "hessian_top_eigenvalue", "hessian_trace"],
    )
    (row,) = made.run(tmp_path / "runs", progress=False).rows.values()
    assert row.status == "done", row.failure
    assert math.isnan(row.readings["hessian_top_eigenvalue"].value)
    assert row.readings["hessian_top_eigenvalue"].notes
    assert math.isfinite(row.readings["squared_norm"].value)


def test_progress_is_told(tmp_path: Path) -> None:
    told = Told()
    study().run(tmp_path / "runs", progress=told)
    assert told.counts["begun"] == (4, 4)
    assert told.counts["trained"] == 4
    assert told.counts["finished"] == ["done"] * 4
    assert (2, 2) in told.counts["epochs"]


def test_rows_are_written_one_by_one_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    measure = tasks.measure_run

    def counting(task: Any, context: Any) -> Any:
        seen.append(len(list((tmp_path / "runs" / "rows").iterdir())))
        return measure(task, context)

    monkeypatch.setattr(tasks, "measure_run", counting)
    study().run(tmp_path / "runs", progress=False)
    assert seen == [0, 1, 2, 3]


def test_an_interrupt_stops_at_once_and_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: dict[str, list[str]]
) -> None:
    measure = tasks.measure_run

    def interrupted(task: Any, context: Any) -> Any:
        if len(work["measure"]) == 2:
            raise KeyboardInterrupt
        return measure(task, context)

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "measure_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            study().run(tmp_path / "runs", progress=False)
    assert Results.load(tmp_path / "runs").counts["missing"] == 2
    trained = len(work["train"])
    assert study().run(tmp_path / "runs", progress=False).counts["done"] == 4
    assert len(work["train"]) - trained in (0, 2)


def test_results_need_a_folder_of_a_study(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StudyError, match=r"study\.json"):
            Results.load(folder)


def test_looking_at_results_imports_nothing_of_the_users(tmp_path: Path) -> None:
    own().run(tmp_path / "runs", progress=False)
    done = subprocess.run(
        [sys.executable, "-m", "saltflat", "study", "status", str(tmp_path / "runs")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "2 done" in done.stdout


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaltflatError, match="Expected a device that torch can use here, but got 'cuda:77'"):
        study().run(tmp_path / "runs", device="cuda:77", progress=False)


@pytest.mark.parametrize(
    ("device", "available", "wanted"),
    [
        (None, False, "cpu"),
        (None, True, "cuda"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        (torch.device("cpu"), True, "cpu"),
    ],
)
def test_a_study_runs_on_a_gpu_if_there_is_one(
    device: Any, available: bool, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(StudyRunner, "run", lambda runner, executor: places.append(runner.context.device))
    study().run(tmp_path / "runs", progress=False, **({} if device is None else {"device": device}))
    assert places == [wanted]


def test_arrays_in_files_can_be_studied(tmp_path: Path) -> None:
    import numpy as np

    draws = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 20)):
        inputs = draws.normal(size=(count, 6)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, targets=draws.integers(0, 3, count))
    data = {"name": str(tmp_path / "train.npz"), "test": str(tmp_path / "test.npz")}
    results = study(data=data, settings={"depth": 1, "batch_size": 10}).run(tmp_path / "runs", progress=False)
    assert results.counts["done"] == 4


@pytest.mark.parametrize("name", ["no_pairs", "nothing"])
def test_data_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SaltflatError, match="Expected "):
        study(data=f"study_cases:{name}").run(tmp_path / "runs", progress=False)


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\n=1", "-inf", "=", "- 1"]
PLAIN = [
    "-1",
    "a\r=1",
    "b\n=1",
    "+1.5e-3",
    "relu",
    "1-1",
    "a=b",
    "",
    "'quoted",
    'with "quotes", and commas',
    "[64, 32]",
]


def test_no_cell_of_a_table_is_a_formula_for_a_spreadsheet(finished: Results) -> None:
    lines = [{text or "name": text for text in [*FORMULAS, *PLAIN]} | {"lr": -0.1, "gap": -math.inf, "steps": [-1]}]
    header, cells = csv.reader(io.StringIO(format_csv(lines), newline=""))
    assert cells[: len(FORMULAS)] == header[: len(FORMULAS)] == [f"'{text}" for text in FORMULAS]
    assert cells[len(FORMULAS) :] == [*PLAIN, "-0.1", "-inf", "[-1]"]
    assert "'" not in finished.csv()


def test_the_fields_of_a_row_are_all_written() -> None:
    row = Row("k", {"lr": 1.0}, "failed")
    assert {each.name for each in fields(Row)} | {"schema", "digest"} == set(row_to_dict(row))


def test_a_store_refuses_what_it_did_not_write(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for each in ("rows", "weights"):
        (tmp_path / each).mkdir()
    save_file({"a": torch.ones(2)}, store.weights_path("k"), {"key": "k", "seconds": "1.0"})
    with pytest.raises(StudyError, match="it lacks 'outcome'"):
        store.read_trained("k")
    shared = torch.ones(3)
    outcome = Outcome("done", 1, 0.5, 0.5, 0.5, 0.5, 4, 4, 6, 1.0, None)
    store.write_trained("s", {}, TrainedNetwork({"a": shared, "b": shared}, outcome, 1.0), {"a": shared})
    found = store.read_trained("s")
    assert found is not None
    assert_close(found[0].weights["b"], shared)
    assert found[0].outcome == outcome
    assert found[1] is not None
    assert store.read_trained("none") is None


def test_a_log_gets_a_line_of_progress_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("saltflat.studies.runner.time.monotonic", lambda: clock[0])
    display = LineDisplay(every=60.0)
    display.begin(8, 10)
    for minutes in (0.5, 1.5, 1.8, 2.6):
        clock[0] = 60 * minutes
        display.update_epochs(int(10 * minutes), 50)
    display.add_trained(4)
    clock[0] = 60 * 5
    display.add_finished("failed")
    assert capsys.readouterr().err.splitlines() == [
        "2 min: epoch 15 of at most 50, 0 of 8 networks trained, 0 of 10 runs finished",
        "3 min: epoch 26 of at most 50, 0 of 8 networks trained, 0 of 10 runs finished",
        "5 min: 4 of 8 networks trained, 1 of 10 runs finished, 1 failed or diverged, about 45 min left",
    ]
