"""The benchmark of large models writes a row for each, goes on where it was, and survives a model that fails."""

import json
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("transformers")
SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"


@pytest.mark.filterwarnings("ignore")  # of the library that builds the models
def test_rows_are_written_once_and_a_failed_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    benchmark = import_module("large_models")
    out = tmp_path / "rows.jsonl"
    words = ["--scale", "tiny", "--out", str(out), "--models", "gpt2", "resnet50", "--kinds", "report"]
    columns, build = benchmark.MODELS["resnet50"]
    monkeypatch.setitem(benchmark.MODELS, "resnet50", (columns, lambda is_tiny: 1 / 0))
    benchmark.main(words)
    first, failed = map(json.loads, out.read_text().splitlines())
    assert failed["error"].startswith("ZeroDivisionError")
    assert first["readings"].keys() | first["left_out"].keys() == set(benchmark.KINDS["report"]["measures"])
    assert first["certificate"]["holds"] is False
    assert sum(first["numbers_by_way"].values()) == first["parameters"]
    assert first["preparations"] == 1
    assert first["seconds"]["second"] >= first["seconds_by_step"]["sweep"] > 0
    monkeypatch.setitem(benchmark.MODELS, "resnet50", (columns, build))
    benchmark.main(words)
    names = [json.loads(line)["model"] for line in out.read_text().splitlines()]
    assert names == ["gpt2", "resnet50", "resnet50"]
    benchmark.main(words)
    assert len(out.read_text().splitlines()) == 3
    assert "second / sweep" in capsys.readouterr().out
