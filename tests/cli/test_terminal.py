"""What reaches a terminal: no text from a file steers it, and the program ends without a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import mlp, normed, pair
from safetensors.torch import save_file
from study_cases import study
from typer.testing import CliRunner, Result

import saltflat
from saltflat.cli import app
from saltflat.cli.program import print_result
from saltflat.datasets.checkpoints import load_weights
from saltflat.errors import SaltflatError
from saltflat.results import Report
from saltflat.studies import Results
from saltflat.studies.row import Row
from saltflat.studies.store.folder import Store

ROOT = Path(__file__).parent.parent.parent
# Sets the title of the window, clears the screen and turns the direction of writing.
EVIL = "\x1b]0;owned\x07\x1b[2J\u202e"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\u202e"
MODEL = ["--model", "factories:mlp"]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "1000", "NO_COLOR": "1"})


def steers_nothing(text: str) -> None:
    assert SHOWN in text
    assert [each for each in text if not each.isprintable() and each != "\n"] == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal") / "runs"
    study(axes={"lr": [0.2, 0.5], "width": [8, 12]}, seeds=2).run(folder, progress=False)
    return folder


def change_rows(folder: Path, change: Callable[[Row], Row]) -> None:
    for row in Results.load(folder).rows.values():
        Store(folder).write_row(change(row))


@pytest.fixture
def hostile(finished: Path, tmp_path: Path) -> Path:
    """A study's folder with an evil name, of whose runs half have failed, and one is damaged."""
    folder = tmp_path / f"runs{EVIL}"
    store = Store(folder)
    for path in finished.rglob("*.json"):
        (folder / path.relative_to(finished)).parent.mkdir(parents=True, exist_ok=True)
        (folder / path.relative_to(finished)).write_bytes(path.read_bytes())
    first, second, *_ = Results.load(folder).rows.values()
    store.write_row(replace(first, status="failed", failure={"error": f"Error: {EVIL}", "traceback": EVIL}))
    path = store.row_path(second.key)
    path.write_text(json.dumps({"schema": EVIL}))
    (folder / ".lock").write_text(json.dumps({"process": EVIL, "machine": EVIL, "since": EVIL}))
    return folder


def test_names_in_files_of_weights_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    for content in ({EVIL: 3}, {"a": torch.ones(1), EVIL: torch.ones(1)}, {"state_dict": {EVIL: "text"}}):
        torch.save(content, path)
        result = run("measure", *MODEL, "--data", "factories:pair", "--weights", path)
        assert result.exit_code == 2
        steers_nothing(result.output)
    torch.save({EVIL: 3}, path)
    with pytest.raises(SaltflatError) as caught:
        load_weights(path)
    steers_nothing(str(caught.value))


def test_names_beside_weights_are_escaped_by_every_command(tmp_path: Path) -> None:
    for make in (normed, mlp):
        torch.save({"state_dict": make().state_dict(), EVIL: 3}, tmp_path / f"{make.__name__}.pt")
    for command, model in {"measure": "mlp", "fold": "normed", "rebalance": "mlp"}.items():
        words = ["--model", f"factories:{model}", "--data", "factories:pair", "--weights", tmp_path / f"{model}.pt"]
        out = ["--out", tmp_path / f"{command}.{'json' if command == 'measure' else 'safetensors'}"]
        result = run(command, *words, *out)
        assert result.exit_code == 0, result.output
        steers_nothing(result.output)


def test_names_of_arrays_are_escaped(tmp_path: Path) -> None:
    inputs, targets = pair()
    arrays: dict[str, Any] = {EVIL: inputs.numpy(), "targets": targets.numpy()}
    np.savez(tmp_path / "d.npz", **arrays)
    save_file({EVIL: inputs, "targets": targets}, tmp_path / "d.safetensors")
    for name in ("d.npz", "d.safetensors"):
        result = run("measure", *MODEL, "--data", tmp_path / name)
        assert result.exit_code == 2
        steers_nothing(result.output)


def test_errors_of_the_users_code_are_escaped_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text(f"raise ValueError({EVIL!r})\n")
    monkeypatch.chdir(tmp_path)
    result = run("measure", "--model", "loud:model", "--data", "factories:pair", "--traceback")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    steers_nothing(result.output)


def test_status_escapes_failures_folders_notes_and_holders(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltflat.studies.store.lock.is_locked", lambda folder: True)
    result = run("study", "status", hostile)
    assert result.exit_code == 0, result.output
    for part in ("1 x Error: ", "runs", "process ", " is damaged"):
        assert part.lower() in result.output.lower()
    steers_nothing(result.stdout)
    steers_nothing(result.stderr)
    steers_nothing(str(Results.load(hostile)))


def test_score_and_report_escape_axes_and_folders(hostile: Path, tmp_path: Path) -> None:
    change_rows(hostile, lambda row: replace(row, config={**row.config, EVIL: row.config["lr"]}))
    store = Store(hostile)
    definition = store.read_definition()
    assert definition is not None
    definition.pop("schema")
    axes = {EVIL if name == "lr" else name: values for name, values in definition["study"]["axes"].items()}
    store.write_definition({**definition, "study": {**definition["study"], "axes": axes}})
    result = run("study", "score", hostile, "--keep-missed")
    assert result.exit_code == 0, result.output
    steers_nothing(result.output)
    assert "\x1b" not in run("study", "score", hostile, "--keep-missed", "--json").stdout
    result = run("study", "report", hostile, "--out", tmp_path / f"page{EVIL}.html", "--keep-missed")
    assert result.exit_code == 0, result.output
    steers_nothing(result.output)


@pytest.mark.parametrize(
    "words",
    [["measure", "--no-certificate"], ["audit", "--draws", 1], ["spectrum", "--k", 1, "--no-density"], ["landscape"]],
    ids=lambda words: words[0],
)
def test_show_escapes_what_files_say(words: list[Any], tmp_path: Path) -> None:
    path = tmp_path / f"{EVIL}.json"
    measures = ["--measures", "squared_norm"] if words[0] in ("measure", "audit") else []
    made = run(*words, *MODEL, "--data", "factories:pair", *measures, "--out", path)
    assert made.exit_code == 0, made.output
    steers_nothing(made.stderr)  # which says where it was written
    content = path.read_text().replace("Sequential", json.dumps(EVIL)[1:-1])
    path.write_text(content.replace("1.weight", json.dumps(EVIL)[1:-1]))
    result = run("show", path)
    assert result.exit_code == 0, result.output
    steers_nothing(result.output)
    if words[0] == "measure":
        steers_nothing(run("compare", path, path).output)
        steers_nothing(repr(Report.load(path)))
        steers_nothing(repr(saltflat.compare(path, path)))


def test_messages_of_a_run_are_escaped(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from saltflat.studies.runner import show_progress

    for progress in (None, True):
        with show_progress(progress) as display:
            display.tell(f"{EVIL} is damaged")
        told = capsys.readouterr().err
        assert SHOWN in told
        assert EVIL[:5] not in told


def test_a_terminal_receives_no_escape_codes_from_files(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Loud:
        def __rich__(self) -> str:
            return f"[bold]{EVIL}[/]"

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "1000"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_result(Results.load(hostile))
    print_result(Loud())
    printed = terminal.getvalue()
    assert "\x1b[1m" in printed
    assert SHOWN in printed
    assert "\x1b]" not in printed
    assert "\x1b[2J" not in printed


def program(
    *words: str, before: str = "", script: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The program in a shell; what is before it, and its last words, go to the shell."""
    start = f"'{sys.executable}' {script or '-m saltflat'}"
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = f"{before} {start} {' '.join(words)}"
    return subprocess.run(["bash", "-c", command], env=given, capture_output=True, text=True, check=False)


def test_closed_streams_are_no_error() -> None:
    for closing in (">&-", "<&- >&- 2>&-"):
        found = program("list", closing)
        assert (found.returncode, found.stderr) == (0, ""), closing
    assert program("show", "none.json", "2>&-").returncode == 2


@pytest.mark.parametrize("command", ["list", "list --json", "--help", "study run --help"])
def test_a_closed_pipe_ends_the_program_quietly(command: str) -> None:
    found = program(command, "| true; exit ${PIPESTATUS[0]}")
    assert (found.returncode, found.stderr) == (141, "")


# Sends Ctrl-C to its own process when a module is looked for.
INTERRUPT = """
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""
# As installers write it.
SCRIPT = """
import sys
from saltflat.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize("installed", [False, True], ids=["module", "script"])
@pytest.mark.parametrize("module", ["torch", "numpy", "typer"])
def test_an_interrupt_during_imports_is_one_line(module: str, installed: bool, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    (tmp_path / "saltflat").write_text(SCRIPT)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "INTERRUPT_AT": module}
    found = program("list", script=tmp_path / "saltflat" if installed else None, **environment)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "Interrupted.\n")


def test_an_interrupt_in_other_programs_is_an_exception(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    (tmp_path / "other.py").write_text("try:\n    import saltflat\nexcept KeyboardInterrupt:\n    print('caught')\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "INTERRUPT_AT": "saltflat._startup"}
    found = program(script=tmp_path / "other.py", **environment)
    assert (found.returncode, found.stdout) == (0, "caught\n")
