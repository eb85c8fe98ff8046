"""The benchmark of batched training runs with every method; times are not tested."""

import json
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"


def test_the_benchmark_of_batched_training_covers_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("SALTFLAT_DATA", str(tmp_path / "nothing"))
    together = import_module("together")
    together.main(["--quick", "--parts", "digits", *together.STACKS, "--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    lenets = ["banded, float32", "grouped, float32", "each, float32"]
    assert [row["way"] for row in rows] == ["alone", "together", *lenets, *lenets, "auto, float32"]
    assert [row["ratio"] for row in rows if row["way"] == "alone"] == [1.0]
    assert all(row["model_epochs_per_second"] > 0 for row in rows)
    # However convolutions are computed, the networks are the same.
    for part in (rows[2:5], rows[5:8]):
        assert [row["loss"] for row in part] == pytest.approx([part[0]["loss"]] * 3, rel=1e-4)
        assert all("RANDOM" in row["data"] and row["notes"] == [] for row in part)
