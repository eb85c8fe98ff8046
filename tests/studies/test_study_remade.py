"""Networks of a study made again from its folder; axes that go hand in hand in its table and scores; its resources."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from study_cases import own, study
from torch.testing import assert_close

from saltflat.errors import DeviceError, StudyError
from saltflat.studies import Results
from saltflat.studies.executors import SerialExecutor, Session, Task
from saltflat.studies.grid import make_recipe
from saltflat.studies.rebuild import load_trained_network
from saltflat.studies.training.build import build_network

PAIRS = [[50, 0.1], [25, 0.2], [20, 0.4]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Results:
    made = study(
        axes={"batch_size, lr": PAIRS, "width": [3, 4]},
        settings={"depth": 1, "label_noise": 0.5, "train_size": 100},
        measure={"examples": 30, "dtype": "float64"},
    )
    return made.run(tmp_path_factory.mktemp("study") / "runs", progress=False)


def test_the_table_has_a_column_for_each_setting_that_goes_hand_in_hand(finished: Results) -> None:
    with (finished.folder / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0])[:5] == ["key", "batch_size", "lr", "width", "seed"]
    found = [[float(line[name]) for name in ("batch_size", "lr", "width")] for line in lines]
    assert found == [[*pair, width] for pair in PAIRS for width in (3, 4)]
    assert Results.load(finished.folder).csv() == finished.csv()


def test_scores_know_an_axis_by_the_first_of_its_names(finished: Results) -> None:
    scores = finished.scores(resamples=0)
    assert list(scores.axes) == ["batch_size", "width"]
    assert list(scores.scores["squared_norm"].granulated_by_axis) == ["batch_size", "width"]


def test_a_network_made_again_has_its_weights_and_what_it_was_trained_on(finished: Results) -> None:
    examples = finished.study.data.examples()
    for key, row in finished.rows.items():
        again = load_trained_network(finished, key, examples)
        held = load_file(finished.folder / "weights" / f"{key}.safetensors")
        assert_close(again.model.state_dict(), {name: value.double() for name, value in held.items()}, rtol=0, atol=0)
        assert not again.model.training
        with torch.no_grad():
            logits = again.model(again.inputs.double())
        assert row.outcome is not None
        assert len(again.labels) == row.outcome.train_examples == 100
        loss = float(torch.nn.functional.cross_entropy(logits, again.labels))
        assert loss == pytest.approx(row.outcome.train_loss, rel=1e-5)
        assert not torch.equal(again.labels, examples.train_labels[:100])
        before = build_network(make_recipe(row.config), examples.shape, examples.classes).state_dict()
        assert again.initial is not None
        assert_close(dict(again.initial), dict(before), rtol=0, atol=0)


def test_a_network_of_a_users_training_is_made_again_too(tmp_path: Path) -> None:
    results = own().run(tmp_path / "runs", progress=False)
    examples = results.study.data.examples()
    for key, row in results.rows.items():
        again = load_trained_network(results, key, examples, allow_code=True)
        assert again.initial is not None
        moved = [(value - again.initial[name].double()).norm() for name, value in again.model.state_dict().items()]
        assert row.outcome is not None
        assert float(torch.stack(moved).norm()) == pytest.approx(row.outcome.distance, rel=1e-6)


def test_what_cannot_be_made_again_is_told(finished: Results, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="got the run 'nothing', of which there are no weights"):
        load_trained_network(finished, "nothing", finished.study.data.examples())
    bare = own(train="study_cases:bare", network=None).run(tmp_path / "runs", progress=False)
    with pytest.raises(StudyError, match="without network"):
        load_trained_network(bare, next(iter(bare.rows)), bare.study.data.examples())


class Watched(SerialExecutor):
    """In this process under the name of a cluster; keeps what the tasks ask for."""

    name = "ray"

    def __init__(self) -> None:
        self.asked: list[Mapping[str, float]] = []

    def open_session(self) -> Session:
        session = super().open_session()
        submit: Callable[..., None] = session.submit

        def watched(task: Task, work: Callable[[Any], Any], **options: Any) -> None:
            self.asked.append(dict(task.resources))
            submit(task, work, **options)

        session.submit = watched  # type: ignore[method-assign]
        return session


@pytest.mark.parametrize(
    ("device", "given", "wanted"),
    [
        ("cuda", None, {"gpus": 1}),
        ("cuda", {"cpus": 2}, {"gpus": 1, "cpus": 2}),
        ("cuda:0", {"gpus": 0.5}, {"gpus": 0.5}),
        ("cpu", None, {}),
        ("cpu", {"gpus": 1}, {"gpus": 1}),
    ],
)
def test_a_task_asks_a_cluster_for_a_gpu_where_the_study_works_on_one(
    device: str, given: dict[str, float] | None, wanted: dict[str, float], tmp_path: Path
) -> None:
    executor = Watched()
    study().run(tmp_path / "runs", executor, device, progress=False, resources=given)
    assert executor.asked
    assert all(each == wanted for each in executor.asked)


def test_the_number_of_a_gpu_is_left_to_the_cluster(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"got the device 'cuda:1' with the executor 'ray'.*Try 'cuda'"):
        study().run(tmp_path / "runs", Watched(), "cuda:1", progress=False)
    assert not (tmp_path / "runs").exists()
