"""How far a run has come, and how long all of it will take."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import saltflat
from saltflat.engine import progress
from saltflat.engine.progress import Forecast, format_duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_of_all_steps_together() -> None:
    clock = Clock()
    forecast = Forecast({"sweep": None, "draws": 20, "search": 100}, clock)
    assert forecast.estimate_seconds_left() is None
    forecast.per_example, forecast.examples = 0.001, 100  # a pass takes 0.1 s
    forecast.begin("sweep")
    assert forecast.estimate_seconds_left() is None
    clock.now = 1.0
    forecast.advance(25, 100)
    assert forecast.estimate_seconds_left() == pytest.approx(3 + 2 + 10)
    clock.now = 4.0
    forecast.end()
    assert forecast.estimate_seconds_left() == pytest.approx(2 + 10)
    forecast.begin("draws")
    clock.now = 5.0
    assert forecast.estimate_seconds_left() == pytest.approx(1 + 10)
    forecast.advance(5, 20)
    assert forecast.estimate_seconds_left() == pytest.approx(3 + 10)
    clock.now = 8.0
    forecast.end()  # after 4 s instead of 2
    assert forecast.estimate_seconds_left() == pytest.approx(2 * 10)
    forecast.begin("search")
    clock.now = 58.0
    assert forecast.estimate_seconds_left() == pytest.approx(5)
    forecast.end()
    assert forecast.estimate_seconds_left() == 0


def test_steps_that_nobody_foresaw_take_no_time_and_unknown_numbers_of_examples_give_none() -> None:
    clock = Clock()
    forecast = Forecast({"search": 100}, clock)
    forecast.per_example = 0.001
    forecast.begin("measures")
    assert forecast.estimate_seconds_left() is None
    forecast.end()
    forecast.examples = 10
    assert forecast.estimate_seconds_left() == pytest.approx(1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "1 s"), (1.4, "1 s"), (89, "89 s"), (91, "2 min"), (3570, "1 h 0 min"), (7300, "2 h 2 min")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


class Slow(nn.Module):
    """Takes its time for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.0005 * len(x))
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("batches", [False, True])
def test_a_function_with_seconds_left_is_told_the_time_of_the_whole_run(batches: bool) -> None:
    data: Any = torch.randn(24, 3), torch.arange(24) % 2
    told: list[tuple[float, str, float | None]] = []

    def tell(step: str, done: int, total: int | None, seconds_left: float | None) -> None:
        told.append((time.perf_counter(), step, seconds_left))

    names = ["hessian_trace", "adaptive_sharpness", "pac_bayes_flatness(draws=2, depth=8)"]
    saltflat.measure(Slow(), [data] if batches else data, measures=names, progress=tell, certificate=False)
    end = time.perf_counter()
    assert len({step for _, step, _ in told}) == 3
    known = [(left, end - now) for now, _, left in told if left is not None]
    assert len(known) >= 10 + 8
    for left, truly in known:
        assert truly / 3 - 0.2 < left < 3 * truly + 0.2


def test_the_bar_shows_the_time_left_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120))
    data = torch.randn(24, 3), torch.arange(24) % 2
    saltflat.measure(Slow(), data, measures=["hessian_trace", "sharpness"], progress=True, certificate=False)
    assert "Search for the largest rise" in screen.getvalue()
    assert "about 1 s left in all" in screen.getvalue()


def test_progress_off_a_terminal_is_lines_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    data = torch.randn(24, 3), torch.arange(24) % 2
    saltflat.measure(Slow(), data, measures=["hessian_trace", "sharpness"], progress=True, certificate=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Sweeping examples: ")
    assert any(line.startswith("Search for the largest rise") for line in lines)
    assert any("left in all" in line for line in lines)
    saltflat.measure(Slow(), data, measures="hessian_trace", certificate=False)
    assert capsys.readouterr().err == ""


def test_watching_a_run_costs_three_passes_over_a_few_examples_and_changes_no_number_and_no_error() -> None:
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    model, data = Counted(3, 2), (torch.randn(48, 3), torch.arange(48) % 2)
    found = []
    for shown in (False, lambda *step: None):
        calls.clear()
        report = saltflat.measure(model, data, measures="hessian_trace", progress=shown, certificate=False)
        found.append((report["hessian_trace"].value, list(calls)))
    (value, plain), (same, watched) = found
    assert same == value
    # The first call of both tries whether the layer has a rule.
    assert watched == [*plain[:1], 32, 32, 32, *plain[1:]]

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no forward pass today")

    for broken, names in ((Failing(3, 2), "hessian_trace"), (model, "adaptive_sharpness(draws='many')")):
        said = []
        for shown in (False, lambda *step: None):
            with pytest.raises((ValueError, saltflat.SaltflatError)) as caught:
                saltflat.measure(broken, data, measures=names, progress=shown)
            said.append((caught.type, str(caught.value)))
        assert said[0] == said[1]
