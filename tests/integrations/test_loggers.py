"""Where the numbers of a watched training go, and what happens when they cannot."""

import json
import sys
import warnings
from collections.abc import Mapping
from io import FileIO, StringIO
from math import inf, isnan, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.errors import LiveError
from rich.live import Live
from torch import nn

from saltflat.errors import MissingPackageError, OptionError, SaltflatError
from saltflat.integrations import JsonLines, MLflow, Monitor, MonitorWarning, Table, TensorBoard, WandB

VALUES = {
    "flatness/loss": 0.5,
    "flatness/rho(axis='row')": nan,
    "flatness/hessian_trace/block.0.weight": 3.0,
    "flatness/lr_lambda_max": 2.5,
}


def watched(loggers: Any = (), **options: Any) -> Monitor:
    torch.manual_seed(0)
    probe = torch.randn(6, 3), torch.arange(6) % 2
    options = {"every": 1, "cap": None, "spectrum": False, **options}
    return Monitor(nn.Linear(3, 2), probe, measures="squared_norm", loggers=loggers, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Files.


def test_every_measurement_is_a_line_as_soon_as_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "flatness.jsonl"
    with watched(JsonLines(path), by_layer=True) as monitor:
        monitor.after_step()
        monitor.after_epoch()
        monitor.after_step()
        found = lines(path)  # while it is open
    assert [(line["step"], line["epoch"]) for line in found] == [(1, 0), (2, 1)]
    assert found[0]["time"] > 1.7e9
    for line, record in zip(found, monitor.history, strict=True):
        assert {name: line[name] for name in record.values} == record.values
        assert set(line) == {"step", "epoch", "time", *record.values}


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    JsonLines(tmp_path / "a.jsonl").log({"nan": nan, "inf": inf, "one": 1.0}, 3)
    text = (tmp_path / "a.jsonl").read_text()
    (line,) = [json.loads(text, parse_constant=pytest.fail)]
    assert line["nan"] is line["inf"] is None
    assert line["one"] == 1.0


def test_another_training_adds_to_the_file_after_a_line_that_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "flat')
    logger = JsonLines(path)
    logger.log({}, 3)
    logger.log({}, 4)
    whole, torn, *added = path.read_text().splitlines()
    assert (whole, torn) == ('{"step": 1}', '{"step": 2, "flat')
    assert [json.loads(line)["step"] for line in added] == [3, 4]


def test_a_line_that_did_not_fit_on_the_disk_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileIO):
        def write(self, data: Any) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return super().write(data[:-10])

    logger = JsonLines(tmp_path / "a.jsonl")
    logger.log({}, 1)
    with monkeypatch.context() as patch:
        patch.setattr("saltflat.integrations.loggers.FileIO", Full)
        with pytest.raises(OSError, match="No space"):
            logger.log({}, 2)
    logger.log({}, 3)
    first, torn, last = (tmp_path / "a.jsonl").read_text().splitlines()
    assert torn.startswith('{"step": 2')
    assert not torn.endswith("}")
    assert [json.loads(line)["step"] for line in (first, last)] == [1, 3]


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "a.jsonl"):
        with pytest.raises(OptionError, match="can be written to, but got"):
            JsonLines(path)


# Hosts.


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written_to_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with watched(TensorBoard(tmp_path), by_layer=True) as monitor:
        monitor.after_step()
        monitor.after_step()
    found = scalars(tmp_path)
    assert set(found) == set(monitor.history[0].values)
    assert "flatness/squared_norm/weight" in found
    for name, points in found.items():
        assert [step for step, _ in points] == [1, 2]
        expected = [record.values[name] for record in monitor.history]
        assert [value for _, value in points] == pytest.approx(expected, rel=1e-6)  # float32 there


def test_a_writer_of_the_user_is_left_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with watched(TensorBoard(writer)) as monitor:
        monitor.after_step()
    writer.add_scalar("loss", 1.0, 5)
    TensorBoard(writer).log({"undefined": nan}, 6)
    writer.close()
    found = scalars(tmp_path)
    assert found["loss"] == [(5, 1.0)]
    assert found["flatness/squared_norm"][0][0] == 1
    assert isnan(found["undefined"][0][1])


def test_a_thing_that_is_no_writer_is_refused() -> None:
    with pytest.raises(OptionError, match="SummaryWriter"):
        TensorBoard(3)  # type: ignore[arg-type]


class Run:
    """As much of a run of Weights & Biases as is used."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None, sync: bool | None = None
    ) -> None:
        self.logged.append((data, step))


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    made = ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


def test_the_active_run_of_weights_and_biases_is_given_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    active, own = Run(), Run()
    module(monkeypatch, "wandb", run=active)
    with watched([WandB(), WandB(own), own]) as monitor:  # a run itself will do, too
        monitor.after_step()
    assert active.logged == [(monitor.history[0].values, 1)]
    assert own.logged == 2 * active.logged


def test_without_an_active_run_of_weights_and_biases_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "wandb", run=None)
    with pytest.raises(OptionError, match=r"wandb\.init"):
        WandB()
    with pytest.raises(OptionError, match="str"):
        WandB("my-run")


def test_mlflow_is_given_names_that_it_allows_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    def log_metrics(
        metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None, run_id: str | None = None
    ) -> None:
        logged.append((metrics, step, run_id))

    module(monkeypatch, "mlflow", log_metrics=log_metrics)
    MLflow("abc").log({**VALUES, "flatness/rho(axis='row')/a": 1.0, "flatness/t/b": inf}, 7)
    MLflow().log({"flatness/loss": nan}, 8)
    assert logged == [
        (
            {
                "flatness/loss": 0.5,
                "flatness/rho_axis_row_.a": 1.0,
                "flatness/hessian_trace.block.0.weight": 3.0,
                "flatness/lr_lambda_max": 2.5,
            },
            7,
            "abc",
        )
    ]


@pytest.mark.parametrize(("host", "make"), [("wandb", WandB), ("mlflow", MLflow)])
def test_a_host_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, host: str, make: Any) -> None:
    monkeypatch.setitem(sys.modules, host, None)
    with pytest.raises(MissingPackageError, match=f"pip install {host}"):
        make()


def test_without_tensorboard_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


@pytest.mark.filterwarnings("default")  # theirs
def test_the_real_weights_and_biases_takes_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="saltflat", dir=str(tmp_path)) as run:
        logger = WandB()
        logger.log(VALUES, 3)
        logger.log({**VALUES, "flatness/loss": 0.25}, 5)
        assert run.step == 5
        logger.log(VALUES, 6)  # the values of a step are complete when another begins
        assert run.summary["flatness/loss"] == 0.25
        assert run.summary["flatness/hessian_trace/block.0.weight"] == 3.0


@pytest.mark.filterwarnings("default")  # theirs
def test_the_real_mlflow_takes_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    with mlflow.start_run() as run:
        MLflow().log({**VALUES, "flatness/rho(axis='row')": 1.5, "flatness/hessian_trace": 4.0}, 3)
        MLflow(run.info.run_id).log({**VALUES, "flatness/rho(axis='row')/é//b..c/d": 2.0}, 5)
    client = mlflow.tracking.MlflowClient()
    points = client.get_metric_history(run.info.run_id, "flatness/loss")
    assert [(point.step, point.value) for point in points] == [(3, 0.5), (5, 0.5)]
    found = client.get_run(run.info.run_id).data.metrics
    # Its files would have one name for a measure and for the folder of the measure's layers.
    assert found["flatness/hessian_trace"] == 4.0
    assert found["flatness/hessian_trace.block.0.weight"] == 3.0
    assert found["flatness/rho_axis_row_"] == 1.5
    assert found["flatness/rho_axis_row_.___b..c_d"] == 2.0


# Any function, and what fails.


def test_a_function_is_a_logger() -> None:
    seen: list[tuple[int, Mapping[str, float]]] = []
    with watched(lambda values, step: seen.append((step, values))) as monitor:
        monitor.after_step()
    assert seen == [(1, monitor.history[0].values)]


def test_a_logger_of_the_user_is_given_the_epoch_if_it_takes_one_and_is_closed() -> None:
    class Mine:
        seen: tuple[int, int] | None = None
        closed = False

        def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
            self.seen = step, epoch

        def close(self) -> None:
            self.closed = True

    mine = Mine()
    with watched([mine], every="1 epoch") as monitor:
        monitor.after_step()
        monitor.after_epoch()
        assert mine.seen == (1, 1)
        assert not mine.closed
    assert mine.closed


def test_a_logger_that_fails_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    class Full:
        def log(self, values: Mapping[str, float], step: int) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError("still full")

    path = tmp_path / "a.jsonl"
    monitor = watched([Full(), JsonLines(path)])
    with pytest.warns(MonitorWarning, match=r"Full .*No space left"):
        monitor.after_step()
    with warnings.catch_warnings(action="error"):
        monitor.after_step()
    with pytest.warns(MonitorWarning, match=r"Full .*still full"):
        monitor.close()
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert len(monitor.history) == 2


def test_a_logger_cannot_change_the_history() -> None:
    def careless(values: Any, step: int) -> None:
        values.clear()

    seen: list[Any] = []
    monitor = watched([careless, lambda values, step: seen.append(values)])
    monitor.after_step()
    assert seen == [monitor.history[0].values]
    assert seen[0]


# The table.


def terminal(width: int = 100, height: int = 30) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def shown(table: Table) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(table.render_grid())
    return printed(console)


def test_on_a_terminal_the_table_shows_the_last_moments_and_where_they_go() -> None:
    console = terminal()
    table = Table(console, columns=3)
    for step, loss in enumerate((9.0, 1.0, 0.5, 0.25, 0.251), start=1):
        edge = {"flatness/lr_lambda_max": step / 2} | ({"flatness/lr_lambda_max_threshold": 2.0} if step > 3 else {})
        table.log({**VALUES, "flatness/loss": loss, **edge}, 100 * step)
    table.close()
    head, *rows = [line.split() for line in shown(table).splitlines() if line.strip() and "─" not in line][1:]
    assert head == ["step", "300", "400", "500"]
    assert rows == [
        ["loss", "0.5", "0.25", "0.251", "→"],
        ["rho(axis='row')", "nan", "nan", "nan"],
        ["lr", "*", "lambda_max", "1.5", "2", "<", "2", "2.5", ">", "2", "↑"],
    ]
    text = printed(console)
    assert "\x1b[" in text  # drawn over
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_a_table_that_is_taller_than_the_screen_is_cut() -> None:
    table = Table(terminal(height=12))
    table.log({f"flatness/m{number}": 1.0 for number in range(20)}, 1)
    table.close()
    text = shown(table)
    assert "m3" in text
    assert "m4" not in text
    assert "and 16 more" in text


def test_where_there_is_no_terminal_every_moment_is_one_line() -> None:
    console = Console(file=StringIO(), width=40)
    with watched(table=Table(console)) as monitor:
        monitor.after_step()
        monitor.after_epoch()
        monitor.after_step()
    first, second = printed(console).splitlines()
    assert first.startswith("step 1, epoch 0  loss ")
    assert second.startswith("step 2, epoch 1  loss ")
    assert "squared_norm" in first
    assert "→" not in first
    assert "→" in second
    assert "\x1b" not in first + second


def test_where_another_live_display_has_the_screen_the_table_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Live, refresh: bool = False) -> None:
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Live, "start", refused)  # as rich does before 14.1
    console = terminal()
    table = Table(console)
    table.log(VALUES, 5)
    table.close()
    assert "step 5  loss 0.5" in printed(console)
    assert "Flatness" not in printed(console)


def test_a_table_can_be_lines_in_a_terminal_too() -> None:
    console = terminal()
    table = Table(console, live=False)
    table.log(VALUES, 5)
    assert "step 5  loss 0.5" in printed(console)
    assert "\x1b[?25l" not in printed(console)


def test_a_name_cannot_steer_the_terminal_or_the_markup() -> None:
    console = Console(file=StringIO(), width=100)
    Table(console).log({"flatness/[red]a\x1b[2J": 1.0}, 1)
    assert "[red]a\\x1b[2J 1" in printed(console)


def test_errors_of_this_part_are_errors_of_the_package() -> None:
    assert issubclass(MissingPackageError, SaltflatError)


# What cannot be a logger, and where files are.


def test_no_loggers_is_none() -> None:
    assert watched(None).measure().values.keys() == watched(()).measure().values.keys()


def test_a_file_stays_where_it_was_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    logger = JsonLines("a.jsonl")
    monkeypatch.chdir(tmp_path / "other")
    logger.log({"one": 1.0}, 1)
    assert len(lines(tmp_path / "a.jsonl")) == 1


@pytest.mark.parametrize("make", [lambda: JsonLines(None), lambda: TensorBoard("/dev/null/nowhere")])  # type: ignore[arg-type]
def test_a_place_that_is_none_is_an_error_in_words(make: Any) -> None:
    with pytest.raises(OptionError, match=r"Expected .*, but got .* Try "):
        make()
