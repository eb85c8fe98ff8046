"""Files of a study that somebody changed, or a disk that did: noticed, set aside, and made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_cases import study

from saltflat.errors import StudyError
from saltflat.studies import Results


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a setting": lambda row: row["config"].update(lr=0.9),
    "an error": lambda row: row["outcome"].update(test_error=0.001),
    "an error as text": lambda row: row["outcome"].update(test_error="small"),
    "no outcome": lambda row: row.update(outcome=None),
    "a reading": lambda row: row["readings"]["squared_norm"].update(value=1.0),
    "a huge count": lambda row: row["outcome"].update(parameters=10**400),
    "seconds as text": lambda row: row["seconds"].update(training="x"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_row_that_was_edited_is_made_again(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    key = list(before.rows)[1]
    edited(tmp_path / "runs" / "rows" / f"{key}.json", change)
    assert any("changed after it was written" in note for note in Results.load(tmp_path / "runs").notes)
    after = study().run(tmp_path / "runs", progress=False)
    assert after.csv() == before.csv()
    assert (tmp_path / "runs" / "rows" / f"{key}.json.damaged").exists()


def test_rows_of_an_earlier_version_have_no_digest_and_are_read(tmp_path: Path) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    for path in (tmp_path / "runs" / "rows").iterdir():
        edited(path, lambda row: row.pop("digest"))
    assert Results.load(tmp_path / "runs").csv() == before.csv()


def test_a_byte_that_flipped_in_weights_is_noticed(tmp_path: Path) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    key = list(before.rows)[1]
    path = tmp_path / "runs" / "weights" / f"{key}.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-20] ^= 1
    path.write_bytes(whole)
    (tmp_path / "runs" / "rows" / f"{key}.json").unlink()
    assert study().run(tmp_path / "runs", progress=False).csv() == before.csv()
    assert path.with_name(f"{path.name}.damaged").exists()


def test_weights_that_are_a_folder_are_set_aside(tmp_path: Path) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    key = list(before.rows)[1]
    path = tmp_path / "runs" / "weights" / f"{key}.safetensors"
    path.unlink()
    path.mkdir()
    assert study().run(tmp_path / "runs", progress=False).csv() == before.csv()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(keys=[[1]] * len(content["keys"])),
        lambda content: content["study"].update(axes={"lr, width": [1, 2, 3, 4]}),
        lambda content: content["study"].update(axes={"lr": list(range(2999)), "width": list(range(2999))}),
    ],
    ids=["keys", "axes", "a grid without end"],
)
def test_a_definition_that_does_not_fit_together_is_told_and_made_again(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    before = study().run(tmp_path / "runs", progress=False)
    edited(tmp_path / "runs" / "study.json", change)
    with pytest.raises(StudyError, match="does not fit together"):
        Results.load(tmp_path / "runs")
    assert study().run(tmp_path / "runs", progress=False).csv() == before.csv()
