"""saltflat study verify: what is wrong in a folder, what the next run makes again, and what could not be checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_cases import as_written_before, own, study
from typer.testing import CliRunner, Result

from saltflat.cli import app
from saltflat.errors import StudyError
from saltflat.studies import Results, Study, verify
from saltflat.studies.store.lock import lock_folder

ROOT = Path(__file__).parent.parent.parent
PAPERS = sorted(path.parent for path in (ROOT / "papers").rglob("study.json"))


def run(folder: Path) -> Result:
    return CliRunner().invoke(app, ["study", "verify", str(folder)], env={"COLUMNS": "300", "NO_COLOR": "1"})


def state(folder: Path) -> dict[str, Any]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino, path.read_bytes() if path.is_file() else None)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    study().run(tmp_path / "runs", progress=False)
    return tmp_path / "runs"


def test_a_folder_as_it_was_written_is_fine_and_left_as_it_is(folder: Path) -> None:
    before = state(folder)
    found = verify(folder)
    assert found.problems == ()
    assert found.checked == {"definition": 1, "row": 4, "weights file": 4, "table": 1}
    assert found.notes == ()
    result = run(folder)
    assert result.exit_code == 0
    assert "4 rows, 4 weights files, 1 table" in result.stdout
    assert "Nothing is wrong" in result.stdout
    assert state(folder) == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


DAMAGES: dict[str, tuple[Study, str, str, str]] = {
    "row": (study(), "rows/*.json", "broken or cut short", "measures the run again"),
    "weights": (study(), "weights/*.safetensors", "deserializing", "trains and measures the run again, with its group"),
    "initial": (own(), "weights/*.initial.safetensors", "deserializing", "trains and measures the run again"),
    "row of a network that cannot be rebuilt": (
        own(train="study_cases:bare", network=None, measures=["squared_norm"]),
        "rows/*.json",
        "broken or cut short",
        "trains and measures the run again",
    ),
    "definition": (study(), "study.json", "broken or cut short", "from the study's YAML file"),
    "table": (study(), "table.csv", "not what the rows say", "writes it again from the rows"),
}


@pytest.mark.parametrize(("made", "files", "why", "rerun"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_named_with_what_the_next_run_does(
    made: Study, files: str, why: str, rerun: str, tmp_path: Path
) -> None:
    before = made.run(tmp_path / "runs", progress=False).csv()
    path = sorted((tmp_path / "runs").glob(files))[0]
    cut(path)
    (problem,) = verify(tmp_path / "runs").problems
    assert problem.file == str(path.relative_to(tmp_path / "runs"))
    assert why in problem.why
    assert rerun in problem.rerun
    untouched = state(tmp_path / "runs")
    result = run(tmp_path / "runs")
    assert result.exit_code == 1
    assert f"{problem.file}: {problem.why}. The next run: {problem.rerun}." in result.stdout
    assert "1 file wrong" in result.stdout
    assert state(tmp_path / "runs") == untouched
    assert made.run(tmp_path / "runs", progress=False).csv() == before
    assert verify(tmp_path / "runs").problems == ()


def test_what_was_set_aside_and_not_made_again_is_wrong_until_it_is(folder: Path) -> None:
    path = sorted(folder.glob("weights/*"))[0]
    path.rename(path.with_name(path.name + ".damaged"))  # a run that was killed right after
    (problem,) = verify(folder).problems
    assert problem.why == "it was set aside and has not been made again"
    before = Results.load(folder).csv()
    assert study().run(folder, progress=False).csv() == before
    found = verify(folder)
    assert found.problems == ()
    assert found.notes == (f"Set aside as damaged before: weights/{path.name}.damaged (1).",)


def test_what_is_not_of_the_study_is_named_and_is_not_wrong(folder: Path) -> None:
    (folder / "partial" / "mine\x1b[2J").mkdir()
    (folder / "rows" / ".1234.part").write_text("half")
    (folder / "notes.txt").write_text("mine")
    found = verify(folder)
    assert found.problems == ()
    result = run(folder)
    assert result.exit_code == 0
    assert "Half written: 1 file" in result.stdout
    assert r"Not of the study, and left alone: partial/mine\x1b[2J, notes.txt (2)" in result.stdout
    assert "\x1b" not in result.stdout


def test_runs_that_are_not_there_yet_are_no_damage(folder: Path) -> None:
    for path in sorted(folder.glob("*/*"))[:2]:
        path.unlink()
    found = verify(folder)
    assert found.problems == ()
    assert "Not there yet: 2 runs" in found.notes[0]
    assert found.notes[1] == "Not checked: 1 table since not all rows are there to compare it with."


def test_damage_in_runs_of_an_earlier_definition_is_told_though_nothing_makes_them_again(folder: Path) -> None:
    study(axes={"lr": [0.1], "width": [3, 4]}).run(folder, progress=False)
    left = {path.stem for path in folder.glob("rows/*")} - set(Results.load(folder).places)
    path = folder / "rows" / f"{min(left)}.json"
    cut(path)
    (problem,) = verify(folder).problems
    assert problem.rerun == "leaves it, since the study no longer has this run"


def test_it_says_what_has_no_digest(folder: Path) -> None:
    as_written_before(folder)
    found = verify(folder)
    assert found.problems == ()
    told = " ".join(found.notes)
    assert "Not checked: 1 definition beyond the form, since earlier versions wrote no digest." in told
    assert "Not checked: 4 rows beyond the form, since earlier versions wrote no digest." in told
    assert "Not checked: 4 weights files beyond the tensors, since the digest of earlier versions covers" in told


@pytest.mark.parametrize("committed", PAPERS, ids=lambda path: str(path.relative_to(ROOT / "papers")))
def test_the_committed_rows_are_read_and_fine(committed: Path) -> None:
    found = verify(committed)
    assert found.problems == ()
    assert sum(found.checked.get(kind, 0) for kind in ("row", "packed row")) == len(Results.load(committed).rows) > 0


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
def test_a_place_without_a_study_is_refused(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "runs")
    with pytest.raises(StudyError, match="Expected a folder that a study was run in"):
        verify(tmp_path / "runs")
    assert run(tmp_path / "runs").exit_code == 2


def test_a_study_that_runs_is_neither_disturbed_nor_called_wrong(folder: Path) -> None:
    with lock_folder(folder):
        result = run(folder)
    assert result.exit_code == 0
    assert f"Process {os.getpid()} on" in result.stdout
    assert "is working on it now" in result.stdout


def test_no_code_that_the_study_names_is_imported(tmp_path: Path) -> None:
    made = own(train="study_cases:bare")
    made.run(tmp_path / "runs", progress=False)
    (tmp_path / "study_cases.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [sys.executable, "-m", "saltflat", "study", "verify", "runs"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "runs: as written: 1 definition, 2 rows, 2 weights files, 1 table" in done.stdout
    assert "imported" not in done.stderr
