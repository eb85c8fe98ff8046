"""saltflat study: what it passes on, what it prints and writes, and how it fails."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from study_cases import own, study
from typer.testing import CliRunner, Result

from saltflat.cli import app
from saltflat.studies import Results, Study, tasks

ROOT = Path(__file__).parent.parent.parent
LEARNS = {"axes": {"lr": [0.2, 0.5], "width": [8, 12]}, "stop": {"epochs": 20, "loss": 1.9}, "seeds": 2}


def run(*words: object) -> Result:
    # Wide, so that no message is broken inside of a word.
    return CliRunner().invoke(app, ["study", *map(str, words)], env={"COLUMNS": "200", "NO_COLOR": "1"})


def written(made: Study, folder: Path) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(made.to_dict()))
    return path


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    result = run("run", written(study(**LEARNS), folder), "--out", folder / "runs")
    assert result.exit_code == 0, result.output
    return folder / "runs"


def test_run_prints_a_summary_and_what_to_do_next(finished: Path) -> None:
    result = run("run", finished.parent / "study.yaml", "--out", finished)
    assert result.exit_code == 0, result.output
    assert "small: 8 runs" in result.stdout
    assert "8 done" in result.stdout
    assert f"saltflat study score {finished}" in result.stderr
    assert "saltflat study report" in result.stderr


def test_quiet_run_prints_nothing(finished: Path) -> None:
    result = run("run", finished.parent / "study.yaml", "--out", finished, "--quiet")
    assert result.exit_code == 0
    assert result.output == ""


def test_status_counts_and_changes_nothing(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    result = run("status", finished)
    assert result.exit_code == 0
    assert "8 done" in result.stdout
    assert run("score", finished).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_status_of_a_study_that_was_stopped_says_how_to_resume(tmp_path: Path) -> None:
    results = study().run(tmp_path / "runs", progress=False)
    (tmp_path / "runs" / "rows" / f"{next(iter(results.rows))}.json").unlink()
    result = run("status", tmp_path / "runs")
    assert "1 missing" in result.stdout
    assert "No process is working on it" in result.stderr
    lines = list(csv.DictReader(io.StringIO(Results.load(tmp_path / "runs").csv())))
    assert [line["status"] for line in lines] == ["missing", "done", "done", "done"]
    assert lines[0]["lr"] == "0.1"


def test_score_prints_every_measure_and_json_has_all(finished: Path) -> None:
    result = run("score", finished)
    assert result.exit_code == 0, result.output
    for name in ("squared_norm", "hessian_trace", "parameters", "train_loss"):
        assert name in result.stdout
    as_json = run("score", finished, "--gap", "loss", "--json")
    assert as_json.exit_code == 0, as_json.output
    found = json.loads(as_json.stdout)
    assert found["gap"] == "loss"
    assert found["runs"] == 8


def test_score_needs_finished_runs_or_keep_missed(tmp_path: Path) -> None:
    study(stop={"epochs": 1, "loss": 1e-6}).run(tmp_path / "runs", progress=False)
    refused(run("score", tmp_path / "runs"), "4 missed", "--keep-missed")
    assert run("score", tmp_path / "runs", "--keep-missed").exit_code == 0


def test_report_writes_one_page(finished: Path, tmp_path: Path) -> None:
    result = run("report", finished, "--out", tmp_path / "report.html", "--audits", 1)
    assert result.exit_code == 0, result.output
    assert f"Wrote {tmp_path / 'report.html'}" in result.stderr
    text = (tmp_path / "report.html").read_text()
    assert "hessian_trace" in text
    assert "small" in text
    assert "Replaced" in run("report", finished, "--out", tmp_path / "report.html", "--audits", 0).stderr


def test_a_report_without_weights_says_so(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs"
    for path in finished.rglob("*"):
        if path.is_file() and path.parent.name != "weights":
            (copy / path.relative_to(finished)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(finished)).write_bytes(path.read_bytes())
    assert run("report", copy, "--out", tmp_path / "report.html").exit_code == 0
    assert "No run was audited" in (tmp_path / "report.html").read_text()


def test_mistakes_are_one_line_and_exit_code_two(tmp_path: Path) -> None:
    path = written(study(), tmp_path)
    refused(run("run", tmp_path / "none.yaml", "--out", tmp_path / "runs"), "none.yaml", "cannot be read")
    refused(run("run", path, "--out", tmp_path / "runs", "--executor", "proceses"), "Try 'processes'")
    refused(run("run", path, "--out", tmp_path / "runs", "--workers", 2), "workers=2", "'serial'")
    refused(run("run", path, "--out", tmp_path / "runs", "--device", "cuda:77"), "cuda:77")
    refused(run("run", path, "--out", path), "is a file")
    refused(run("status", tmp_path), "study.json")
    refused(run("score", tmp_path, "--gap", "eror"), "Try 'error'")
    refused(run("report", tmp_path, "--out", tmp_path / "report.html"), "study.json")
    path.write_text(path.read_text().replace("axes:", "axis:"))
    refused(run("run", path, "--out", tmp_path / "runs"), "Try 'axes'")
    assert not (tmp_path / "runs").exists()


def test_all_problems_of_a_grid_are_one_line(tmp_path: Path) -> None:
    path = written(study(axes={"lr": [-1.0, 0.1], "widht": [3]}), tmp_path)
    refused(run("run", path, "--out", tmp_path / "runs"), "2 problems", "lr=-1.0", "Try 'width'")


def test_a_report_that_cannot_be_written_fails_before_the_work(finished: Path, tmp_path: Path) -> None:
    refused(run("report", finished, "--out", tmp_path / "none" / "report.html"), "folder does not exist")


def test_failed_runs_are_counted_and_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(own(train="study_cases:failing"), tmp_path)
    result = run("run", path, "--out", tmp_path / "runs")
    assert result.exit_code == 0
    assert "1 failed" in result.stdout
    assert "1 x ZeroDivisionError: a width of 3" in result.stdout
    assert "--retry-failed" in result.stderr
    monkeypatch.setenv("STUDY_HEALED", "1")
    assert "1 failed" in run("run", path, "--out", tmp_path / "runs").stdout
    assert "2 done" in run("run", path, "--out", tmp_path / "runs", "--retry-failed").stdout


def test_an_interrupt_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "measure_run", interrupted)
    path = written(study(), tmp_path)
    result = run("run", path, "--out", tmp_path / "runs")
    assert result.exit_code == 130
    assert f"Resume with: saltflat study run {path} --out {tmp_path / 'runs'}" in result.stderr


def test_the_program_can_be_interrupted_inspected_and_resumed(tmp_path: Path) -> None:
    made = study(settings={"depth": 1, "batch_size": 1}, stop={"epochs": 10_000})
    path, folder = written(made, tmp_path), tmp_path / "runs"
    words = [sys.executable, "-m", "saltflat", "study", "run", str(path), "--out", str(folder), "--every", "0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    program = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 90
        while not list(folder.glob("partial/*.safetensors")):
            assert time.monotonic() < until
            assert program.poll() is None
            time.sleep(0.1)
        looked = run("status", folder)
        assert "4 missing" in looked.stdout
        assert f"Process {program.pid} on" in looked.stderr
        refused(run("run", path, "--out", folder), f"process {program.pid}", "is working in")
        program.send_signal(signal.SIGINT)
        _, told = program.communicate(timeout=60)
    finally:
        program.kill()
        program.communicate()
    assert program.returncode == 130, told
    assert "Finished runs are kept" in told
    assert "Traceback" not in told
    assert Results.load(folder).counts["missing"] == 4


def test_modules_beside_the_study_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_network.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes, width=2):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    path = written(study(network="my_own_network:make", settings={}), tmp_path)
    result = run("run", path, "--out", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    assert "4 done" in result.stdout


def test_a_page_with_another_suffix_and_negative_audits_raise(finished: Path, tmp_path: Path) -> None:
    refused(run("report", finished, "--out", tmp_path / "page.txt"), "page.txt", ".html")
    refused(run("report", finished, "--out", tmp_path / "page.html", "--audits", "-1"), "audits=-1")
    assert not list(tmp_path.iterdir())
