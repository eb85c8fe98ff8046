"""All competitors of the benchmarks compute the same thing; times are not tested."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"


@pytest.fixture
def curvature(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)  # as when the script is run, which puts its folder first
    return import_module("curvature")


@pytest.mark.parametrize("network", ["lenet", "resnet20"])
def test_the_benchmark_finds_saltflat_and_a_plain_vmap_in_agreement(curvature: Any, network: str) -> None:
    task = curvature.problem(network, examples=3)
    # In float64: in float32 an activation within rounding of zero may fall on either side of a ReLU.
    task = curvature.Problem(task.model.double(), task.inputs.double(), task.targets)
    entries = curvature.agreement(task, ["saltflat", "vmap"], "1GiB")
    assert [row.reason for row, _ in entries] == [""] * 5
    differences = {(row.competitor, row.statistic): row.difference for row, _ in entries}
    assert differences.pop(("forward-backward", "")) is None
    assert set(differences) == {(c, s) for c in ("saltflat", "vmap") for s in curvature.STATISTICS}
    assert max(differences.values()) < 1e-10


def test_a_competitor_that_fails_is_listed_with_its_reason(curvature: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Any:
        raise ModuleNotFoundError("No module named 'peer'")

    monkeypatch.setitem(curvature.COMPETITORS, "backpack", absent)
    entries = curvature.agreement(curvature.problem("lenet", examples=3), ["backpack"], "1GiB")
    failed = [(row.reason, call) for row, call in entries if row.competitor == "backpack"]
    assert failed == [("ModuleNotFoundError: No module named 'peer'", None)] * 2


def test_a_wrong_value_shows_as_a_difference(curvature: Any) -> None:
    task = curvature.problem("lenet", examples=3)
    right = curvature.COMPETITORS["vmap"](task, "curvature_diagonal", curvature.Setting())()
    wrong = dict(right) | {"0.bias": 1.5 * right["0.bias"]}
    assert curvature.networks.difference(right, right) == 0
    assert curvature.networks.difference(wrong, right) == pytest.approx(0.5)
    total = {"": sum(v.sum() for v in right.values())}
    assert curvature.networks.difference(total, right) < 1e-5


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("SALTFLAT_DATA", str(tmp_path / "nothing"))
    # The peers are not installed everywhere; a plain vmap is.
    competitors = import_module("parts.gram").COMPETITORS
    for peer in ("BackPACK", "nngeometry"):
        monkeypatch.delitem(competitors, peer)
    monkeypatch.delitem(import_module("parts.density").COMPETITORS, "curvlinops")
    return import_module("measures")


def test_the_benchmark_of_measures_finds_all_competitors_in_agreement(
    measures: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measures.main(["--quick", "--out", str(tmp_path / "found.json")])
    found = {part: each["found"] for part, each in json.loads((tmp_path / "found.json").read_text())["parts"].items()}
    assert set(found) == set(measures.PARTS)
    assert max(row["difference_float64"] for row in found["timing"]["rows"]) < 1e-10
    assert all(row["extrapolated"] for row in found["timing"]["rows"])
    ours, *others = found["balance"]["rows"]
    assert ours["residual"] <= 1e-10
    assert all(ours["value"] < other["value"] for other in others)
    # Ours is the minimum, and above nothing that a general optimizer finds.
    assert found["minimum"]["residual"] <= 1e-10
    assert found["minimum"]["minimum"] < found["minimum"]["lbfgs"] * (1 + 1e-9) < found["minimum"]["trace"]
    assert max(row["difference"] for row in found["spectrum"]["rows"]) < 1e-8
    assert all(row["sweeps_alone"] in (None, row["steps"]) for row in found["spectrum"]["rows"])
    assert {row["competitor"] for row in found["density"]["rows"]} == {"saltflat, k=1", "saltflat, k=10"}
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-13)):
        differences = found["gram"]["precisions"][dtype]["difference"]
        assert set(differences) == {"saltflat", "saltflat, prepared", "vmap"}
        assert max(differences.values()) < tolerance
    assert {"RANDOM", "EXTRAPOLATED"} <= set(capsys.readouterr().out.replace(":", " ").split())


def test_a_target_that_is_missed_is_called_so(measures: Any) -> None:
    parts = import_module("parts")
    targets = tuple(parts.Target(name, "2", reached) for name, reached in (("hit", True), ("miss", False)))
    table = measures.verdicts({"part": parts.Outcome(measures.Table(), targets, None)}, quick=False)
    assert list(table.columns[3].cells) == ["reached", "NOT REACHED"]


@pytest.mark.parametrize("limit", [None, 0.0])
def test_a_wrong_second_derivative_shows_as_a_difference(measures: Any, limit: float | None) -> None:
    timing, networks = import_module("parts.timing"), import_module("networks")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3)).double()
    task = networks.Problem(model, torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3)
    right = timing.loop(task, limit)
    assert right.whole == (limit is None)
    assert len(right.entries) == (27 if limit is None else 1)
    assert timing.difference(task, right) < 1e-12
    wrong = timing.Loop(right.entries, 1.5 * right.values, right.count, right.seconds)
    assert timing.difference(task, wrong) == pytest.approx(0.5)


def test_the_benchmark_of_training_steps_knows_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    training = import_module("training")
    training.main(["--quick", "--networks", "lenet", "--device", "cpu", "--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["step"] for row in rows] == [*training.COMPETITORS, *training.TERMS]
    assert [row["ratio"] for row in rows if row["step"] == "plain"] == [1.0]
    assert all(row["milliseconds"] > 0 for row in rows)


def test_the_benchmark_of_scores_times_every_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    scores = import_module("scores")
    scores.make_study(tmp_path / "study", 12, 2)
    found = scores.steps(tmp_path / "study")
    assert list(found) == ["start", "load", "scores", "table", "page"]
    assert all(step["memory"] > 0 for step in found.values())
    assert found["page"]["bytes"] == (tmp_path / "study" / "page.html").stat().st_size
    assert scores.shown([{"rows": 12, "measures": 2, "steps": found}]).row_count == 4


def test_the_benchmark_of_recorded_training_times_every_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("SALTFLAT_DATA", str(tmp_path / "nothing"))
    recorded = import_module("recorded")
    recorded.main(["--quick", "--device", "cpu", "--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert list(rows) == list(recorded.CASES)
    for name, row in rows.items():
        assert row["seconds"] > 0
        assert row["notes"] == []
        assert ("plain_loop" in row) == recorded.CASES[name].plain
    assert "RANDOM" in json.loads((tmp_path / "found.json").read_text())["data"]


def test_the_benchmark_of_measuring_in_a_row_finds_the_same_readings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("SALTFLAT_DATA", str(tmp_path / "nothing"))
    import_module("stack_measure").main(["--quick", "--out", str(tmp_path / "found.json")])
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["difference"] < 1e-10
    assert row["seconds_in_a_row"] > 0


def test_the_benchmark_of_the_meter_prepares_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    meter = import_module("meter")
    monkeypatch.setattr(meter, "NETWORKS", {"lenet": meter.NETWORKS["lenet"]})
    meter.main(["--repeats", "1", "--examples", "8", "--out", str(tmp_path / "meter.json")])
    rows = json.loads((tmp_path / "meter.json").read_text())["rows"]
    assert [(row["measures"], row["examples"], row["preparations"]) for row in rows] == [
        ("quick", 8, 1),
        ("hessian_trace", 8, 1),
    ]
    assert all(0 < row["checks"] < row["second"] for row in rows)
