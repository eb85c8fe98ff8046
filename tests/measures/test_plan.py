"""The plan of a measurement: what it says beforehand is what the measurement does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from factories import mlp, pair
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import saltflat
from saltflat.cli import app
from saltflat.engine import sweep
from saltflat.engine.progress import Forecast
from saltflat.errors import EmptyDataError, ModelError
from saltflat.measures.trial import Trial
from saltflat.results.plan import MeasurementPlan


class Tokens(nn.Module):
    """A class token that no layer owns, a convolution and a head with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.head = nn.Linear(4, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.patches(x).flatten(2).transpose(1, 2)
        whole = torch.cat([self.token.expand(len(x), 1, 4), rows], 1)
        out: Tensor = self.head(torch.tanh(whole).mean(1))
        return out


def images(examples: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 1, 4, 4), torch.arange(examples) % 3


def test_measures_and_reasons_are_those_of_the_report() -> None:
    model, data = mlp(), pair()
    found = saltflat.plan(model, data, measures=["quick", "distance_from_init"])
    report = saltflat.measure(model, data, measures=["quick", "distance_from_init"])
    undefined = {name: each.notes[0] for name, each in report.items() if each.value != each.value}
    assert undefined  # the distance is asked for by name, without the initial weights
    assert list(found.measures) == [name for name in report if name not in undefined]
    assert found.left_out == {**report.left_out, **undefined}
    assert found.settings["strategy"] == report.settings["strategy"]
    assert found.examples == report.examples


def test_a_plan_in_another_precision_than_the_datas_has_the_measures_of_the_report() -> None:
    model, (inputs, labels) = mlp().float(), pair()
    data = inputs.float(), labels
    asked: dict[str, Any] = {"measures": ["relative_flatness", "hessian_top_eigenvalue"], "dtype": torch.float64}
    assert list(saltflat.plan(model, data, **asked).measures) == list(saltflat.measure(model, data, **asked))


@pytest.mark.parametrize("certificate", [True, False])
def test_targets_that_do_not_count_at_the_beginning_are_skipped(certificate: bool) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), (torch.randn(200, 3), torch.arange(200) % 2)
    data[1][:150] = -100
    found = saltflat.plan(model, data, measures="quick", certificate=certificate)
    report = saltflat.measure(model, data, measures="quick", certificate=certificate)
    assert list(found.measures) == list(report)
    assert found.examples == report.examples == 200
    if certificate:
        assert report.certificate is not None
        assert report.certificate["holds"] is None
        assert "first examples" in report.certificate["failed"]
    data[1][:] = -100
    with pytest.raises(EmptyDataError, match="all ignored"):
        saltflat.plan(model, data)


def test_a_model_without_gradients_has_a_plan_and_a_report() -> None:
    model, data = mlp(), pair()
    model.register_forward_hook(lambda module, inputs, output: output.detach())
    report = saltflat.measure(model, data, measures=["hessian_trace"])
    assert list(saltflat.plan(model, data, measures=["hessian_trace"]).measures) == list(report) == ["hessian_trace"]
    assert report["hessian_trace"].value == 0


def test_each_parameter_has_a_way_and_a_reason() -> None:
    found = saltflat.plan(Tokens(), images(), measures="hessian_trace", certificate=False)
    ways = {each.name: (each.way, each.why) for each in found.parameters}
    assert ways["token"][0] == "expanded"
    assert ways["patches.weight"] == ("layer", "rule of Conv2d")
    assert ways["head.bias"] == ("not measured", "frozen (no requires_grad)")
    assert not any("not swept" in note for note in found.notes)
    alone = saltflat.plan(Tokens(), images(), measures="hessian_trace", layers=["head", "patches"], certificate=False)
    ways = {each.name: (each.way, each.why) for each in alone.parameters}
    assert ways["patches.weight"] == ("layer", "rule of Conv2d")
    assert ways["token"] == ("not measured", "not among layers=")
    recurrent = CASES["lstm_in_two_directions"]()
    slow = saltflat.plan(recurrent.model, recurrent.batches, recurrent.loss, "hessian_trace", certificate=False)
    assert {each.way for each in slow.parameters} == {"single"}
    assert all("vectorized" in each.why for each in slow.parameters)
    assert any("not swept with all examples together" in note for note in slow.notes)


def test_a_plan_says_what_running_statistics_do_to_measures() -> None:
    norm = nn.BatchNorm1d(3)
    model, data = (
        nn.Sequential(nn.Linear(2, 3), norm, nn.ReLU(), nn.Linear(3, 2)),
        (torch.randn(4, 2), torch.arange(4) % 2),
    )
    told = [note for note in saltflat.plan(model, data, measures="hessian_trace").notes if "saltflat.fold" in note]
    assert len(told) == 1
    assert told[0].startswith("Running statistics (1) absorb")
    folded = saltflat.plan(saltflat.fold(model.eval(), data[0]), data, measures="hessian_trace")
    assert not any("saltflat.fold" in note for note in folded.notes)


def test_names_are_not_broken_to_make_room_for_reasons() -> None:
    part = nn.Module()
    part.layers_scale_of_the_second_branch = nn.Parameter(torch.ones(1, 1, 2))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = part, nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            scale: Any = self.block.layers_scale_of_the_second_branch
            found: Tensor = self.head((x.unsqueeze(1) * scale).sum(1))
            return found

    found = saltflat.plan(Scaled(), (torch.randn(4, 2), torch.arange(4) % 3), measures="hessian_trace")
    lines = str(found).splitlines()
    assert any(line.startswith("block.layers_scale_of_the_second_branch ") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("sampling", [True, False])
@pytest.mark.parametrize("kind", ["pair", "batches", "loader"])
@pytest.mark.parametrize(("examples", "memory"), [(7, "1GiB"), (600, "1GiB"), (600, "2MB"), (900, "600kB")])
def test_chunks_are_counted_as_the_sweep_makes_them(
    kind: str, sampling: bool, examples: int, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = torch.randn(examples, 4), torch.arange(examples) % 3
    data: Any = {
        "pair": (inputs, targets),
        "batches": list(zip(inputs.split(64), targets.split(64), strict=True)),
        "loader": DataLoader(TensorDataset(inputs, targets), batch_size=100),
    }[kind]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 3))
    sizes = []
    run = Trial._scale_seconds

    def record_size(trial: Trial) -> None:
        sizes.append(trial._size)
        run(trial)

    monkeypatch.setattr(Trial, "_scale_seconds", record_size)
    options: dict[str, Any] = {"measures": "hessian_trace", "memory": memory, "certificate": False}
    found = saltflat.plan(model, data, sampling=sampling, **options)
    assert found.examples == examples
    chunks: list[int] = []
    add = sweep.Sweep._add_chunk

    def count(self: sweep.Sweep, batch: Any, *rest: Any) -> None:
        chunks.append(batch.examples)
        add(self, batch, *rest)

    monkeypatch.setattr(sweep.Sweep, "_add_chunk", count)
    saltflat.measure(model, data, sampling=sampling, **options)
    (size,) = sizes
    assert size.groups * size.repeats == pytest.approx(len(chunks), rel=0.25)
    assert size.chunk == pytest.approx(max(chunks), rel=0.25, abs=1)


class Slow(nn.Module):
    """Takes its time for every example."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        super().__init__()
        self.layer, self.wait = nn.Linear(3, 2), wait

    def forward(self, x: Tensor) -> Tensor:
        self.wait(0.01 + 0.002 * len(x))
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("examples", [24, 400])
def test_seconds_are_those_of_a_clock_that_counts_examples(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    data = torch.randn(examples, 3), torch.arange(examples) % 2
    measures = ["relative_flatness", "fisher_logdet", "adaptive_sharpness"]
    found = saltflat.plan(Slow(wait), data, measures=measures, certificate=False)
    report = saltflat.measure(Slow(wait), data, measures=measures, certificate=False)
    assert found.predicted_seconds == pytest.approx(report.seconds, rel=0.3)
    assert found.seconds < report.seconds or examples == 24


def test_a_plan_is_kept_in_a_file_and_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ["--model", "factories:mlp", "--data", "factories:pair", "--measures", "hessian_trace,kappa"]
    run = CliRunner().invoke(app, ["doctor", *options, "--out", str(path)])
    assert run.exit_code == 0, run.output
    for said in ("rule of Linear", "Computes: hessian_trace", "Symmetries: ", "Time: about", "Memory: "):
        assert said in run.output
    found = MeasurementPlan.load(path)
    assert found == MeasurementPlan.from_dict(json.loads(path.read_text()))
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0
    assert "Computes: hessian_trace" in shown.output


def test_what_the_measurement_refuses_the_plan_refuses() -> None:
    with pytest.raises(ModelError, match="one output"):
        saltflat.plan(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), (torch.randn(6, 4), torch.zeros(6).long()))


def test_a_meter_that_planned_knows_the_time_left_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[Any] = []
    init = Forecast.__init__

    def record_seconds(self: Forecast, *arguments: Any, **options: Any) -> None:
        seconds.append(options["seconds"])
        init(self, *arguments, **options)

    monkeypatch.setattr(Forecast, "__init__", record_seconds)
    left: list[float | None] = []

    def record(step: str, done: int, total: int | None, seconds_left: float | None) -> None:
        left.append(seconds_left)

    meter = saltflat.Meter(mlp(), measures="hessian_trace", progress=record)
    plan = meter.plan(pair())
    meter.measure(pair())
    assert left[0] is not None
    assert seconds == [plan.predicted_seconds_by_step]


def test_the_time_left_covers_the_certificate_too() -> None:
    now = iter([0.0, 0.0, 1.0])
    forecast = Forecast({"sweep": 2.0}, lambda: next(now), seconds={"certificate": 3.0})
    forecast.per_example, forecast.examples = 0.5, 1
    assert forecast.estimate_seconds_left() == 4.0
    forecast.begin("sweep")
    forecast.end()
    assert forecast.estimate_seconds_left() == 3.0
