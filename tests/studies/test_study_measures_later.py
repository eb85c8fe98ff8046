"""Measures that are asked for later: what was measured before stays, whatever becomes of the new ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saltflat.errors import StudyError
from saltflat.studies import Results, Study, tasks


def study(measures: list[str], data: Any = "digits") -> Study:
    return Study(
        "later", data, {"lr": [0.05, 0.1]}, network="mlp", settings={"width": 4, "depth": 1}, stop={"epochs": 1},
        measures=measures, measure={"examples": 20},
    )  # fmt: skip


def readings(results: Results) -> list[list[str]]:
    return [sorted(row.readings) for row in results.rows.values()]


def test_other_measures_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    before = study(["squared_norm", "hessian_trace"]).run(tmp_path)
    values = [row.readings["hessian_trace"].value for row in before.rows.values()]
    after = study(["distance_from_init"]).run(tmp_path)
    assert readings(after) == [["distance_from_init", "hessian_trace", "squared_norm"]] * 2
    assert [row.readings["hessian_trace"].value for row in after.rows.values()] == values
    assert set(after.scores().scores) & {"hessian_trace", "squared_norm"} == set(), "only what the study asks for"


def test_a_measure_that_fails_later_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study(["squared_norm", "hessian_trace"]).run(tmp_path)

    def full(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "measure_run", full)
        after = study(["squared_norm", "hessian_trace", "kappa_trace"]).run(tmp_path)
    for row in after.rows.values():
        assert row.status == "done"
        assert row.readings["hessian_trace"].value > 0
        assert math.isnan(row.readings["kappa_trace"].value)
        assert "no room" in row.readings["kappa_trace"].notes[0]


def test_data_that_changed_are_noticed_after_a_detour(tmp_path: Path) -> None:
    def write(seed: int) -> None:
        draws = np.random.default_rng(seed)
        for name in ("train", "test"):
            inputs = draws.standard_normal((40, 3)).astype(np.float32)
            np.savez(tmp_path / f"{name}.npz", inputs=inputs, targets=np.arange(40) % 2)

    def taken(limit: int) -> Study:
        source = {"name": str(tmp_path / "train.npz"), "test": str(tmp_path / "test.npz"), "train_limit": limit}
        return Study(
            "files", source, {"lr": [0.1]}, network="mlp", settings={"width": 4, "batch_size": 8}, stop={"epochs": 1},
            measures=["squared_norm"], measure={"examples": 10},
        )  # fmt: skip

    write(0)
    taken(40).run(tmp_path / "runs")
    taken(30).run(tmp_path / "runs")
    write(1)
    for limit in (40, 30):
        with pytest.raises(StudyError, match="not those which the runs"):
            taken(limit).run(tmp_path / "runs")
