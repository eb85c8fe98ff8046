"""The benchmark of measuring in a row finds the readings of measuring alone; times are not tested."""

import json
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"


def test_the_benchmark_of_stacks_finds_the_same_readings_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("SALTFLAT_DATA", str(tmp_path / "nothing"))
    benchmark = import_module("stack_measure")
    benchmark.main(["--quick", "--parts", "lenet5", "mlp", "--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["network"], row["networks"]) for row in rows] == [("lenet5", 2), ("mlp", 2)]
    for row in rows:
        assert "RANDOM" in row["data"]
        assert row["difference"] < 1e-10
        assert row["ratio"] == pytest.approx(row["seconds_one_by_one"] / row["seconds_in_a_row"])
        assert row["share_of_training"] == pytest.approx(row["seconds_in_a_row"] / row["seconds_of_training"])
