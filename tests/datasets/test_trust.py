"""Code that files name: what runs it, what does not, and what is said before it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_cases import own, study
from typer.testing import CliRunner, Result

from saltflat.cli import app
from saltflat.errors import CodeNotAllowedError, StudyError
from saltflat.studies import Results
from saltflat.studies.rebuild import audit_runs, load_trained_network
from saltflat.studies.store.folder import Store

ROOT = Path(__file__).parent.parent.parent
LEARNS = {"axes": {"lr": [0.2, 0.5], "width": [8, 12]}, "stop": {"epochs": 20, "loss": 1.9}, "seeds": 2}
# Leaves a mark when it is imported, and says so where the names should have been printed before.
CODE = """
import sys
from pathlib import Path
from study_cases import network as make, pairs as data, train
Path(__file__).with_name("ran").touch()
print("foreign_code is imported", file=sys.stderr)
"""


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust") / "runs"
    assert study(**LEARNS).run(folder, progress=False).counts["done"] == 8
    return folder


@pytest.fixture
def foreign(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Somebody's folder, with code beside it that could be imported; one stands in the middle of it."""
    shutil.copytree(finished, tmp_path / "runs")
    (tmp_path / "foreign_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "runs"
    sys.modules.pop("foreign_code", None)


def name_in_definition(folder: Path, **changes: Any) -> None:
    store = Store(folder)
    definition = store.read_definition()
    assert definition is not None
    definition.pop("schema")
    store.write_definition({**definition, "study": {**definition["study"], **changes}})


def name_in_rows(folder: Path) -> None:
    for row in Results.load(folder).rows.values():
        Store(folder).write_row(replace(row, config={**row.config, "network": "foreign_code:make"}))


def name_network(folder: Path) -> None:
    name_in_definition(folder, network="foreign_code:make")
    name_in_rows(folder)


def name_training(folder: Path) -> None:
    name_in_definition(folder, train="foreign_code:train", network="foreign_code:make")


def name_data(folder: Path) -> None:
    name_in_definition(folder, data={"name": "foreign_code:data"})


NAMED = [
    pytest.param(name_network, "foreign_code:make", id="network"),
    pytest.param(name_in_rows, "foreign_code:make", id="network in the rows only"),
    pytest.param(name_training, "foreign_code:make", id="train"),
    pytest.param(name_data, "foreign_code:data", id="data"),
]


@pytest.mark.parametrize(("change", "name"), NAMED)
def test_commands_on_a_folder_run_no_code_that_it_names(
    change: Callable[[Path], None], name: str, foreign: Path, tmp_path: Path
) -> None:
    change(foreign)
    page = tmp_path / "page.html"
    for words in (["status", foreign], ["score", foreign], ["report", foreign, "--out", page]):
        result = run("study", *words)
        assert result.exit_code == 0, result.output
        assert "foreign_code is imported" not in result.output
    assert not (tmp_path / "ran").exists()
    assert "foreign_code" not in sys.modules
    said = f"Audits were left out. Expected permission to import and call {name}, which the study's files name"
    assert said in result.stderr
    assert "--allow-code" in result.stderr
    assert said.replace("'", "&#39;") in page.read_text()


@pytest.mark.parametrize(("change", "name"), NAMED)
def test_code_is_named_before_it_is_imported(
    change: Callable[[Path], None], name: str, foreign: Path, tmp_path: Path
) -> None:
    change(foreign)
    result = run("study", "report", foreign, "--out", tmp_path / "page.html", "--audits", 1, "--allow-code")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "ran").exists()
    first = result.stderr.splitlines()[:2]
    assert first == [f"Importing and calling {name}, named by {foreign}.", "foreign_code is imported"]


def test_a_folder_of_ready_made_networks_needs_no_permission(finished: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("study", "report", finished, "--out", page, "--audits", 1)
    assert result.exit_code == 0, result.output
    assert "left out" not in result.stderr
    assert "No run was audited" not in page.read_text()
    assert "Importing" not in result.stderr


def test_python_asks_for_permission_too(foreign: Path, tmp_path: Path) -> None:
    name_network(foreign)
    results = Results.load(foreign)
    examples = results.study.data.examples()
    key = next(iter(results.rows))
    with pytest.raises(CodeNotAllowedError, match=r"foreign_code:make.*allow_code=True"):
        load_trained_network(results, key, examples)
    with pytest.raises(CodeNotAllowedError, match="foreign_code:make"):
        audit_runs(results, 1)
    results.write_html(tmp_path / "page.html", audits=1)
    name_data(foreign)
    with pytest.raises(CodeNotAllowedError, match="foreign_code:data"):
        Results.load(foreign).study.data.examples()
    assert "foreign_code" not in sys.modules
    assert Results.load(foreign).study.data.examples(allow_code=True).classes == 3
    assert (tmp_path / "ran").exists()


def test_a_study_of_ones_own_code_is_audited_when_allowed(tmp_path: Path) -> None:
    results = own(
        data="study_cases:pairs",
        train=None,
        network="study_cases:generous",
        axes={"lr": [0.1]},
        settings={"batch_size": 20},
    ).run(tmp_path / "runs", progress=False)
    said: list[str] = []
    found = audit_runs(results, 1, progress=False, allow_code=True, tell=said.append)
    assert list(found) == list(results.rows)
    assert said == [f"Importing and calling study_cases:pairs and study_cases:generous, named by {results.folder}."]


def test_weights_that_do_not_fit_leave_a_page_without_audits(foreign: Path, tmp_path: Path) -> None:
    for row in Results.load(foreign).rows.values():
        found = Store(foreign).read_trained(row.key)
        assert found is not None
        others = {"other": next(iter(found[0].weights.values()))}
        Store(foreign).write_trained(row.key, row.config, replace(found[0], weights=others), found[1])
    result = run("study", "report", foreign, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "No run was audited: RuntimeError" in result.stderr


def test_modules_in_the_current_folder_do_not_replace_ours(finished: Path, tmp_path: Path) -> None:
    """Packages that only a page needs are imported late, when a command has long begun."""
    for name in ("jinja2", "markupsafe", "matplotlib", "yaml", "pandas"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    words = [sys.executable, "-P", "-m", "saltflat", "study", "report", str(finished), "--out", "page.html"]
    words += ["--audits", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    made = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert not (tmp_path / "ran").exists()
    assert "hessian_trace" in (tmp_path / "page.html").read_text()


def test_a_definition_that_is_too_deep_is_one_error(foreign: Path) -> None:
    name_in_definition(foreign, settings={"depth": json.loads(60 * "[" + 60 * "]")})
    with pytest.raises(StudyError, match="at most 20 levels"):
        Results.load(foreign)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(StudyError, match="at most 20 levels"):
        study(settings={"depth": endless})


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("config", "lr", 10**400),
        ("outcome", "train_loss", None),
        ("outcome", "epochs", "many"),
        ("outcome", "notes", [3]),
        ("seconds", "training", {}),
        ("failure", "traceback", "without an error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_row_with_odd_values_is_called_damaged(
    part: str, name: str, value: Any, foreign: Path, tmp_path: Path
) -> None:
    path = min((foreign / "rows").glob("*.json"))
    row = json.loads(path.read_text())
    row.pop("digest")
    path.write_text(json.dumps({**row, part: {**(row[part] or {}), name: value}}))
    for words in (["status"], ["score"], ["report", "--out", tmp_path / "page.html", "--audits", 0]):
        result = run("study", *words, foreign)
        assert result.exit_code == 0, result.output
    assert [path.name in note for note in Results.load(foreign).notes] == [True]


def test_help_says_which_commands_run_code() -> None:
    said = {name: " ".join(run("study", *name.split(), "--help").stdout.split()) for name in ("", "run", "report")}
    assert "run imports and calls the functions that the study names" in said[""]
    assert "imports and calls the functions that STUDY.yaml names" in said["run"]
    assert "--allow-code" in said["report"]


def test_the_page_on_security_names_commands_and_options_that_exist() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`saltflat ((?:study )?[a-z]+)", page))
    assert {"study run", "study report", "study status", "study score", "show", "compare"} <= named
    for command in named:
        assert run(*command.split(), "--help").exit_code == 0, command
