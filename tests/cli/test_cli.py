"""The command line: what it passes on, what it prints and writes, and how it fails."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import mlp, pair
from torch import nn
from torch.testing import assert_close
from typer.testing import CliRunner, Result

import saltflat
from saltflat.cli import app, parse_names
from saltflat.errors import SaltflatError
from saltflat.results import Reading, Report

DIGITS = '{"inputs": 64, "outputs": 10}'
REQUIRED = ["measure", "--model", "factories:mlp", "--data", "factories:pair"]


def report(**changes: Any) -> Report:
    facts: dict[str, Any] = {
        "readings": {"trace": Reading("trace", 3.5, layers={"1.weight": 1.5, "3.weight": 2.0})},
        "left_out": {},
        "legend": {"trace": {"meaning": "how it bends", "smaller": "flatter"}},
        "model": "Sequential, 27 parameters",
        "examples": 6,
        "loss": 1.25,
        "settings": {"columns": "exact"},
        "versions": {"saltflat": "0.2.0"},
        "device": "cpu",
        "seconds": 0.5,
        "seconds_by_step": {"sweep": 0.5},
        "certificate": None,
        "notes": ("A note of the measurement.",),
        "created": "2025-01-01T00:00:00+00:00",
    }
    return Report(**{**facts, **changes})


class Call:
    """Stands in for ``saltflat.measure`` and keeps what it was given."""

    def __init__(self, found: Report | BaseException) -> None:
        self.found = found
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Report:
        self.args, self.options = args, options
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Call:
    call = Call(report())
    monkeypatch.setattr(saltflat, "measure", call)
    return call


def run(*words: object) -> Result:
    # Wide, so that no message is broken inside of a word.
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "NO_COLOR": "1"})


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in (*words, "Expected ", ", but got ")), result.stderr
    assert "Traceback" not in result.stderr


def test_measure_passes_its_defaults_on(measured: Call) -> None:
    result = run(*REQUIRED)
    assert result.exit_code == 0, result.output
    model, data, loss, measures = measured.args
    assert isinstance(model, nn.Sequential)
    assert_close(data, pair(), rtol=0, atol=0)
    assert (loss, measures) == ("cross_entropy", None)
    assert measured.options == {
        "columns": "exact",
        "layers": None,
        "memory": "1GiB",
        "dtype": None,
        "seed": 0,
        "progress": None,
        "logits": "none",
        "diagonal": "exact",
        "precision": "ieee",
        "initial": None,
        "certificate": True,
    }
    assert "trace" in result.stdout
    assert "3.5" in result.stdout


def test_measure_passes_every_option_on(measured: Call, tmp_path: Path) -> None:
    torch.save(mlp(width=5).state_dict(), tmp_path / "initial.pt")
    result = run(
        *REQUIRED,
        *("--model-args", '{"width": 5}', "--initial", tmp_path / "initial.pt"),
        *("--skip", 1, "--limit", 3, "--loss", "mse", "--columns", "top:2", "--dtype", "float64", "--device", "cpu"),
        *("--measures", "rho(axis='row', p=2),trace", "--measures", "frobenius", "--layers", "1,3.weight"),
        *("--memory", "64MiB", "--seed", 7, "--logits", "centred", "--diagonal", "sampled"),
        *("--no-certificate", "--precision", "tf32"),
    )
    assert result.exit_code == 0, result.output
    model, data, loss, measures = measured.args
    assert model[1].out_features == 5
    inputs, targets = pair()
    assert_close(data, (inputs[1:4].double(), targets[1:4]), rtol=0, atol=0)
    assert (loss, measures) == ("mse", ["rho(axis='row', p=2)", "trace", "frobenius"])
    initial = measured.options.pop("initial")
    assert_close(initial, dict(torch.load(tmp_path / "initial.pt", weights_only=True)), rtol=0, atol=0)
    assert measured.options == {
        "columns": "top:2",
        "layers": ["1", "3.weight"],
        "memory": "64MiB",
        "dtype": torch.float64,
        "seed": 7,
        "progress": None,
        "logits": "centred",
        "diagonal": "sampled",
        "precision": "tf32",
        "certificate": False,
    }


def test_a_report_holds_what_the_library_measures(tmp_path: Path) -> None:
    names = ["hessian_trace", "squared_norm"]
    words = ("--data", "digits", "--limit", 20, "--measures", ",".join(names), "--dtype", "float64", "--seed", 3)
    result = run("measure", "--model", "factories:mlp", "--model-args", DIGITS, *words, "--out", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    torch.manual_seed(3)
    images, classes = sklearn_digits()
    wanted = saltflat.measure(
        mlp(**json.loads(DIGITS)), (images[:20], classes[:20]), measures=names, dtype=torch.float64
    )
    found = Report.load(tmp_path / "a.json")
    assert dict(found) == dict(wanted)
    assert found.loss == wanted.loss
    assert found.examples == 20


@pytest.mark.parametrize(
    ("name", "folder", "inputs", "outputs"),
    [
        ("mnist", "MNIST", 784, 10),
        ("cifar10", "cifar-10-batches-py", 3072, 10),
        ("cifar100", "cifar-100-python", 3072, 100),
    ],
)
def test_published_data_is_measured_on(name: str, folder: str, inputs: int, outputs: int, tmp_path: Path) -> None:
    data = Path(os.environ.get("SALTFLAT_DATA", "data"))
    if not (data / folder).is_dir():
        pytest.skip(f"{folder} is not in the folder SALTFLAT_DATA")
    arguments = json.dumps({"inputs": inputs, "outputs": outputs})
    result = run(
        *("measure", "--model", "factories:mlp", "--model-args", arguments, "--data", name, "--data-dir", data),
        *("--limit", 12, "--normalize", "standard", "--measures", "hessian_trace", "--out", tmp_path / "a.json"),
    )
    assert result.exit_code == 0, result.output
    found = Report.load(tmp_path / "a.json")
    assert found.examples == 12
    assert found["hessian_trace"].value > 0
    assert found.certificate is not None
    assert found.certificate["holds"]


def test_the_seed_draws_the_weights_of_an_untrained_model(measured: Call) -> None:
    drawn = []
    for seed in (0, 0, 1):
        run(*REQUIRED, "--seed", seed)
        drawn.append(measured.args[0][1].weight.detach())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_model_that_has_a_name_is_taken_as_it_is(measured: Call) -> None:
    from factories import fixed

    run("measure", "--model", "factories:fixed", "--data", "factories:loader")
    assert measured.args[0] is fixed


def test_data_comes_in_the_models_precision(measured: Call) -> None:
    run("measure", "--model", "factories:double", "--data", "factories:pair")
    assert measured.args[1][0].dtype == torch.float64


def test_weights_are_put_into_the_model_and_noted(measured: Call, tmp_path: Path) -> None:
    trained = mlp()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {f"module.{name}": value for name, value in trained.state_dict().items()}}, path)
    result = run(*REQUIRED, "--weights", path, "--limit", 4, "--out", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert_close(dict(measured.args[0].state_dict()), dict(trained.state_dict()), rtol=0, atol=0)
    notes = " ".join(Report.load(tmp_path / "report.json").notes)
    for said in ("A note of the measurement.", "checkpoint.pt", "'model'", "prefixes", "factories:pair, limit 4"):
        assert said in notes


def test_random_weights_are_said_to_be_random(measured: Call, tmp_path: Path) -> None:
    result = run(*REQUIRED, "--out", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    first, *_ = Report.load(tmp_path / "report.json").notes
    assert first.startswith("No weights were given (--weights): these are the random initial weights of factories:mlp")
    assert "No weights were given" in " ".join(result.stdout.split())


def test_a_prefix_in_the_file_is_noted(measured: Call, tmp_path: Path) -> None:
    trained = mlp()
    path = tmp_path / "checkpoint.pt"
    torch.save({f"net.{name}": value for name, value in trained.state_dict().items()}, path)
    words = ("--weights", path, "--initial", path, "--out", tmp_path / "report.json")
    result = run(*REQUIRED, *words)
    assert result.exit_code == 0, result.output
    assert_close(dict(measured.args[0].state_dict()), dict(trained.state_dict()), rtol=0, atol=0)
    assert_close(dict(measured.options["initial"]), dict(trained.state_dict()), rtol=0, atol=0)
    notes = Report.load(tmp_path / "report.json").notes
    assert sum("The prefix 'net.' was removed" in note for note in notes) == 2
    assert not any("No weights" in note for note in notes)


def test_named_data_is_read_with_its_options(measured: Call) -> None:
    words = ("--data", "digits", "--split", "test", "--skip", 2, "--limit", 3, "--normalize", "half")
    result = run("measure", "--model", "factories:mlp", *words)
    assert result.exit_code == 0, result.output
    inputs, targets = measured.args[1]
    wanted = sklearn_digits()
    assert_close(inputs, 2 * wanted[0][1202:1205] - 1)
    assert targets.tolist() == wanted[1][1202:1205].tolist()


def sklearn_digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(classes)


def test_the_folder_of_data_may_be_in_the_environment(measured: Call, tmp_path: Path) -> None:
    words = ["measure", "--model", "factories:mlp", "--data", "mnist"]
    refused(CliRunner().invoke(app, words, env={"SALTFLAT_DATA": str(tmp_path / "there")}), "there/MNIST")
    refused(run(*words, "--data-dir", tmp_path / "here"), "here/MNIST")


def test_modules_in_the_current_folder_are_found(
    measured: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("from factories import mlp as net, pair as data\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    result = run("measure", "--model", "only_here:net", "--data", "only_here:data")
    assert result.exit_code == 0, result.output
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "only_here")


def test_results_are_written(measured: Call, tmp_path: Path) -> None:
    out, plot = tmp_path / "report.json", tmp_path / "figure.png"
    result = run(*REQUIRED, "--out", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert Report.load(out)["trace"].value == 3.5
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert result.stderr == f"Wrote {out}.\nWrote {plot}.\n"
    again = run(*REQUIRED, "--out", out, "--plot", tmp_path / "figure.SVG")
    assert again.stderr == f"Replaced {out}.\nWrote {tmp_path / 'figure.SVG'}.\n"
    assert b"<svg" in (tmp_path / "figure.SVG").read_bytes()


def test_a_plot_that_cannot_be_written_leaves_the_old_one(
    measured: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "figure.png"
    plot.write_text("old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    result = run(*REQUIRED, "--plot", plot)
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert plot.read_text() == "old"
    assert os.listdir(tmp_path) == ["figure.png"]


def test_weights_that_are_rounded_are_noted(measured: Call, tmp_path: Path) -> None:
    torch.save({name: value.double() + 1e-12 for name, value in mlp().state_dict().items()}, tmp_path / "w.pt")
    run(*REQUIRED, "--weights", tmp_path / "w.pt", "--out", tmp_path / "report.json")
    assert any("float64 were rounded to float32" in note for note in Report.load(tmp_path / "report.json").notes)


def test_quiet_prints_nothing(measured: Call, tmp_path: Path) -> None:
    result = run(*REQUIRED, "--quiet", "--out", tmp_path / "report.json")
    assert (result.exit_code, result.output) == (0, "")
    assert measured.options["progress"] is False
    assert (tmp_path / "report.json").exists()
    refused(run(*REQUIRED, "--quiet"), "--out")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--out", "{}/missing/report.json"], ["--out", "missing"]),
        (["--out", "{}"], ["--out", "is a folder"]),
        (["--plot", "{}/missing/figure.png"], ["--plot", "missing"]),
        (["--plot", "{}"], ["--plot", "is a folder"]),
        (["--plot", "{}/figure.jpg"], ["--plot", "figure.jpg", "png or svg or pdf"]),
        (["--out", "{}/a.png", "--plot", "{}/a.png"], ["both --out and --plot"]),
        (["--out", "{}/pipe"], ["--out", "no regular file"]),
        (["--plot", "{}/pipe"], ["--plot", "no regular file"]),
        (["--out", "{}/" + 300 * "a"], ["--out", "too long"]),
        (["--plot", "{}/figure"], ["--plot"]),
        (["--model-args", "{{"], ["--model-args", "JSON"]),
        (["--model-args", "[1]"], ["--model-args", "[1]"]),
        (["--model-args", '{{"widht": 3}}'], ["widht", "arguments inputs, width, outputs"]),
        (["--model", "factories:fixed", "--model-args", '{{"width": 3}}'], ["Sequential"]),
        (["--model", "factories:no_model"], ["a str", "factories:no_model"]),
        (["--model", "factories:mpl"], ["'mpl'", "Try 'mlp'"]),
        (["--model", "factories"], ["package.module:function"]),
        (["--model", ".factories:mlp"], ["package.module:function"]),
        (["--model", "factories:mlp.x"], ["'x' in factories.mlp", "leaving .x out"]),
        (["--model", "factories:broken"], ["ZeroDivisionError: a mistake of the user's", "factories.py:"]),
        (["--model", "factories:leaving"], ["SystemExit: 3", "factories.py:"]),
        (["--model-args", 100_000 * "["], ["--model-args", "recursion"]),
        (["--weights", "{}/" + 300 * "a"], ["too long"]),
        (["--data", 300 * "a"], ["too long"]),
        (["--data", "mnist", "--data-dir", "{}/" + 300 * "a"], ["too long"]),
        (["--seed", str(2**64)], ["seed="]),
        (["--device", "meta"], ["meta", "--device cpu"]),
        (["--model", "no_such_package.models:net"], ["no_such_package"]),
        (["--weights", "{}/none.pt"], ["none.pt", "does not exist"]),
        (["--initial", "{}/none.pt"], ["none.pt", "does not exist"]),
        (["--data", "mnits"], ["mnits", "Try 'mnist'"]),
        (["--data", "{}/none.npz"], ["none.npz"]),
        (["--limit", "0"], ["limit=0"]),
        (["--dtype", "float16"], ["dtype", "float32"]),
        (["--device", "nonsense"], ["nonsense", "--device cpu"]),
        (["--device", "cuda:77"], ["cuda:77", "--device cpu"]),
        (["--measures", "rho(axis='row'"], ["parentheses"]),
        (["--measures", ","], ["at least one name"]),
    ],
)
def test_bad_requests_fail_before_the_work(words: list[str], parts: list[str], measured: Call, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(run(*REQUIRED, *(word.format(tmp_path) for word in words)), *parts)
    assert measured.args == ()


def test_what_the_library_refuses_is_one_line(measured: Call) -> None:
    measured.found = SaltflatError("Expected less,\n  but got this. Try nothing [at all].")
    refused(run(*REQUIRED), "less, but got this.", "[at all]")


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("saltflat.measures.measurer"), "parse_bytes", None)
    result = run(*REQUIRED)
    assert isinstance(result.exception, TypeError)
    assert result.exit_code == 1


def test_errors_of_user_code_are_one_line_or_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.py").write_text("ones = 1\ntwos = = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused(run(*REQUIRED, "--model", "wrong:ones"), "SyntaxError: invalid syntax from wrong:ones", "wrong.py:2")
    words = [*REQUIRED, "--model", "factories:careless"]
    refused(run(*words), "KeyError: 'b' from factories:careless", "factories.py:")
    refused(run(*REQUIRED, "--model-args", '{"inputs": 5}'), "RuntimeError: mat1 and mat2")
    refused(run(*REQUIRED, "--data", "factories:torn"), "LookupError: a page is missing from factories:torn")
    full = run(*words, "--traceback")
    assert full.exit_code == 2
    assert 'return {"a": inputs}["b"]' in full.stderr


def test_an_interrupt_is_one_line(measured: Call) -> None:
    measured.found = KeyboardInterrupt()
    result = run(*REQUIRED)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_names_are_split_at_commas_outside_of_parentheses() -> None:
    assert parse_names(None) is None
    assert parse_names(["a, b(c=1,d=(2,3)) ,e", "f,"]) == ["a", "b(c=1,d=(2,3))", "e", "f"]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str, float], Path]:
    def save(name: str, value: float) -> Path:
        report(readings={"trace": Reading("trace", value)}).save(tmp_path / name)
        return tmp_path / name

    return save


def test_show_prints_a_report_again(saved: Callable[[str, float], Path]) -> None:
    result = run("show", saved("a.json", 6.25))
    assert result.exit_code == 0, result.output
    assert "trace" in result.stdout
    assert "6.25" in result.stdout


def test_show_names_what_is_no_report(tmp_path: Path) -> None:
    refused(run("show", tmp_path / "none.json"), "none.json")
    (tmp_path / "other.json").write_text("{}")
    refused(run("show", tmp_path / "other.json"), "other.json")


def test_compare_gives_all_reports_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def compare(*paths: Path, names: Any = None) -> str:
        calls.append((paths, names))
        return "side by side"

    monkeypatch.setattr(saltflat, "compare", compare)
    result = run("compare", "a.json", "b.json", "c.json", "--measures", "rho(a=1,b=2),trace")
    assert result.stdout == "side by side\n"
    assert calls == [((Path("a.json"), Path("b.json"), Path("c.json")), ["rho(a=1,b=2)", "trace"])]


def test_reports_are_compared(saved: Callable[[str, float], Path]) -> None:
    result = run("compare", saved("a.json", 6.25), saved("b.json", 12.5))
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("trace", "6.25", "12.5"))
    refused(run("compare", saved("a.json", 6.25)), "two or more reports", "got 1")


def test_list_prints_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("list").stdout == f"{saltflat.list_measures()}\n"
    found = json.loads(run("list", "--json").stdout)
    assert [each["name"] for each in found] == [each.name for each in saltflat.list_measures()]
    facts = {"name", "meaning", "formula", "invariant_to", "smaller", "needs", "reference", "options", "cost"}
    assert all(each.keys() == facts for each in found)
    assert all(each["meaning"] and each["reference"] for each in found)


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"saltflat {saltflat.__version__}\n"


@pytest.mark.parametrize("command", ["measure", "compare", "list", "show"])
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_invalid_command_lines_exit_with_code_2() -> None:
    assert run("measure").exit_code == 2
    assert run("mesure").exit_code == 2
    assert run("compare").exit_code == 2


def test_it_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "saltflat"]
    root = Path(saltflat.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1"}
    found = subprocess.run([*words, "show", "none.json"], env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("Expected ")
    with open("/dev/full", "w") as full:
        lost = subprocess.run([*words, "list"], env=environment, stdout=full, stderr=-1, text=True, check=False)
    assert lost.returncode == 2
    assert lost.stderr.startswith("Expected a standard output that can be written, but got No space")
    assert lost.stderr.count("\n") == 1


def test_an_interrupt_before_the_commands_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saltflat.cli.main", Call(KeyboardInterrupt()))
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("saltflat", run_name="__main__")
    assert stop.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"
