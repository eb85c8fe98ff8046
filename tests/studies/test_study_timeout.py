"""A time limit for the runs of a study."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from study_cases import own, study
from typer.testing import CliRunner
from waiting_cases import FOLDER

from saltflat.cli import app
from saltflat.errors import OptionError
from saltflat.studies.executors import SerialExecutor, Session, make_executor
from saltflat.studies.executors.executor import Task


class Noting(SerialExecutor):
    """In this process under another name; keeps the time limits of the tasks instead of keeping to them."""

    name = "processes"

    def __init__(self) -> None:
        self.limits: list[tuple[str, int, float | None]] = []

    def open_session(self) -> Session:
        session = super().open_session()
        submit: Callable[..., None] = session.submit

        def noting(task: Task, work: Callable[[Any], Any], *, soon: bool = False, timeout: float | None = None) -> None:
            self.limits.append((type(task).__name__, len(getattr(task, "configs", "1")), timeout))
            submit(task, work, soon=soon)

        session.submit = noting  # type: ignore[method-assign]
        return session


def test_a_group_that_hangs_fails_alone_and_goes_on_from_its_checkpoint_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Bytes can be compared where every process adds in the same order.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    chosen = study(network="waiting_cases:network", settings={"batch_size": 50}, stop={"epochs": 4})
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "marks"))
    runs = tmp_path / "runs"
    found = chosen.run(runs, make_executor("processes", workers=1), progress=False, every=0.0, timeout=5.0)
    assert found.counts == {"done": 2, "missed": 0, "diverged": 0, "failed": 2, "missing": 0}
    failures = {row.failure["error"] for row in found.rows.values() if row.failure is not None}
    (failure,) = failures
    assert failure.startswith("TimedOut: Expected a result within 10 s, but got none, and the work was stopped.")
    assert "--retry-failed" in failure
    monkeypatch.delenv(FOLDER)
    (checkpoint,) = (runs / "partial").iterdir()
    with safe_open(checkpoint, framework="pt") as file:
        assert json.loads(file.metadata()["facts"])["stacks"][0]["epoch"] > 0
    chosen.run(runs, progress=False, retry_failed=True)
    chosen.run(tmp_path / "calm", progress=False)
    assert (runs / "table.csv").read_bytes() == (tmp_path / "calm" / "table.csv").read_bytes()


def test_networks_that_are_trained_together_share_the_sum_of_their_time(tmp_path: Path) -> None:
    executor = Noting()
    study(seeds=3).run(tmp_path / "runs", executor, progress=False, timeout=5.0)
    trained = [each for each in executor.limits if each[0] == "TrainTask"]
    assert trained == [("TrainTask", 6, 30.0)] * 2
    assert [each for each in executor.limits if each not in trained] == [("MeasureTask", 1, 5.0)] * 12


def test_there_is_no_limit_unless_one_is_given(tmp_path: Path) -> None:
    executor = Noting()
    own().run(tmp_path / "runs", executor, progress=False)
    assert {limit for _, _, limit in executor.limits} == {None}


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_a_limit_that_is_no_positive_number_is_refused_before_any_work(timeout: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Expected a positive number.* but got timeout="):
        own().run(tmp_path / "runs", "processes", progress=False, timeout=timeout)
    assert not (tmp_path / "runs").exists()


def test_this_process_cannot_stop_a_run_and_says_so_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"got timeout=5\.0 with executor='serial'.*Try executor='processes'"):
        own().run(tmp_path / "runs", progress=False, timeout=5.0)
    assert not (tmp_path / "runs").exists()


def test_the_command_line_takes_a_limit_and_names_an_executor_that_keeps_to_it(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("{name: small, data: digits, axes: {lr: [0.1]}, stop: {epochs: 1}}", encoding="utf-8")
    runs = tmp_path / "runs"
    found = CliRunner().invoke(app, ["study", "run", str(path), "--out", str(runs), "--timeout", "60"])
    assert found.exit_code == 2
    assert "(--executor processes)" in " ".join(found.stderr.split())
    assert not runs.exists()
