"""Files of a study that somebody changed, or a disk that did: noticed, set aside, and made again."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save
from study_cases import Told, as_written_before, facts_of, own, put, study

from saltflat.errors import StudyError
from saltflat.studies import Results, verify
from saltflat.studies.canonical import compute_digest
from saltflat.studies.store.folder import Store
from saltflat.studies.training.batched_epoch import BatchTrainer


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Finished and left alone."""
    return study().run(tmp_path_factory.mktemp("calm") / "runs", progress=False)


@pytest.fixture
def folder(calm: Results, tmp_path: Path) -> Path:
    """A finished study to damage."""
    shutil.copytree(calm.folder, tmp_path / "runs")
    return tmp_path / "runs"


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
def test_a_row_that_was_edited_is_made_again(
    change: Callable[[dict[str, Any]], object], calm: Results, folder: Path
) -> None:
    key = list(calm.rows)[1]
    edited(folder / "rows" / f"{key}.json", change)
    assert any("changed after it was written" in note for note in Results.load(folder).notes)
    after = study().run(folder, progress=False)
    assert after.csv() == calm.csv()
    assert (folder / "rows" / f"{key}.json.damaged").exists()


def test_rows_of_an_earlier_version_have_no_digest_and_are_read(calm: Results, folder: Path) -> None:
    for path in (folder / "rows").iterdir():
        edited(path, lambda row: row.pop("digest"))
    assert Results.load(folder).csv() == calm.csv()


def test_a_byte_that_flipped_in_weights_is_noticed(calm: Results, folder: Path) -> None:
    key = list(calm.rows)[1]
    path = folder / "weights" / f"{key}.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-20] ^= 1
    path.write_bytes(whole)
    (folder / "rows" / f"{key}.json").unlink()
    assert study().run(folder, progress=False).csv() == calm.csv()
    assert path.with_name(f"{path.name}.damaged").exists()


def test_weights_that_are_a_folder_are_set_aside(calm: Results, folder: Path) -> None:
    key = list(calm.rows)[1]
    path = folder / "weights" / f"{key}.safetensors"
    path.unlink()
    path.mkdir()
    assert study().run(folder, progress=False).csv() == calm.csv()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(keys=[[1]] * len(content["keys"])),
        lambda content: content["study"].update(axes={"lr, width": [1, 2, 3, 4]}),
        lambda content: content["study"].update(axes={"lr": list(range(2999)), "width": list(range(2999))}),
        lambda content: content["study"].update(axes=dict(reversed(content["study"]["axes"].items()))),
        lambda content: content["keys"].reverse(),
    ],
    ids=["keys", "axes", "a grid without end", "axes in another order", "keys in another order"],
)
def test_a_definition_that_does_not_fit_together_is_told_and_made_again(
    change: Callable[[dict[str, Any]], object], calm: Results, folder: Path
) -> None:
    edited(folder / "study.json", change)
    with pytest.raises(StudyError, match=r"it was changed after it was written|does not match its rows"):
        Results.load(folder)
    edited(folder / "study.json", lambda content: content.pop("digest"))  # as an earlier version wrote it
    with pytest.raises(StudyError, match="does not match its rows"):
        Results.load(folder)
    assert study().run(folder, progress=False).csv() == calm.csv()


def rewritten(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change what is written beside the tensors of a file."""
    tensors, facts = load(path.read_bytes()), facts_of(path)
    change(facts)
    path.write_bytes(save(tensors, facts))


def swapped(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def without_rows(folder: Path) -> None:
    for path in folder.glob("rows/*.json"):
        path.unlink()


def set_outcome(facts: dict[str, str]) -> None:
    facts["outcome"] = json.dumps({**json.loads(facts["outcome"]), "test_error": 0.001})


FACTS: dict[str, Callable[[dict[str, str]], object]] = {
    "another outcome": set_outcome,
    "an outcome that is no JSON": lambda facts: facts.update(outcome="{"),
    "other seconds": lambda facts: facts.update(seconds="1e9"),
    "another key": lambda facts: facts.update(key="0" * 16),
    "no outcome": lambda facts: facts.pop("outcome"),
    "no digest under its name": lambda facts: facts.update(dhgest=facts.pop("digest")),
    "more": lambda facts: facts.update(more="than was written"),
}


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "not measured"])
def test_what_is_written_beside_the_weights_is_secured(
    change: Callable[[dict[str, str]], object], finished: bool, calm: Results, folder: Path
) -> None:
    if not finished:
        without_rows(folder)
    path = folder / "weights" / f"{list(calm.rows)[1]}.safetensors"
    rewritten(path, change)
    told = Told()
    assert study().run(folder, progress=told).csv() == calm.csv()
    assert any(path.name in text and "set aside" in text for text in told.texts)
    assert verify(folder).problems == ()


@pytest.mark.parametrize("earlier", [True, False], ids=["an earlier version", "this version"])
def test_weights_under_the_name_of_another_run_are_noticed(earlier: bool, calm: Results, folder: Path) -> None:
    if earlier:
        as_written_before(folder)
    without_rows(folder)
    # Of the same width: either network could be filled with them.
    one, _, other, _ = (folder / "weights" / f"{key}.safetensors" for key in calm.rows)
    swapped(one, other)
    told = Told()
    assert study().run(folder, progress=told).csv() == calm.csv()
    assert sum("it is of the run" in text for text in told.texts) == 2


INITIAL: dict[str, Callable[[Path, Path], object]] = {
    "cut": lambda path, other: path.write_bytes(path.read_bytes()[:-3]),
    "gone": lambda path, other: put(path, "nothing"),
    "a folder": lambda path, other: put(path, "folder"),
    "of another run": lambda path, other: path.write_bytes(other.read_bytes()),
}


@pytest.mark.parametrize("change", INITIAL.values(), ids=INITIAL)
@pytest.mark.parametrize("around", ["finished", "not measured", "failed"])
def test_weights_before_training_that_are_damaged_are_made_again(
    change: Callable[[Path, Path], object], around: str, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    before = own().run(folder, progress=False)
    if around == "not measured":
        without_rows(folder)
    elif around == "failed":
        for row in before.rows.values():
            failed = replace(row, status="failed", failure={"error": "Error: no", "traceback": ""})
            Store(folder).write_row(failed)
    change(*(folder / "weights" / f"{key}.initial.safetensors" for key in before.rows))
    told = Told()
    assert own().run(folder, progress=told, retry_failed=True).csv() == before.csv()
    assert sum(".initial.safetensors is damaged" in text for text in told.texts) == 1
    assert own().run(folder, progress=told).csv() == before.csv()
    assert verify(folder).problems == ()


def test_damaged_weights_of_a_failed_run_wait_until_it_is_tried_again(calm: Results, folder: Path) -> None:
    key = next(iter(calm.rows))
    failed = replace(calm.rows[key], status="failed", failure={"error": "Error: no", "traceback": ""})
    Store(folder).write_row(failed)
    path = folder / "weights" / f"{key}.safetensors"
    path.write_bytes(b"")
    told = Told()
    assert study().run(folder, progress=told).counts["failed"] == 1
    assert told.texts == []
    (problem,) = verify(folder).problems
    assert "--retry-failed" in problem.rerun
    assert study().run(folder, progress=told, retry_failed=True).csv() == calm.csv()
    assert len(told.texts) == 1
    assert verify(folder).problems == ()


def test_folders_of_an_earlier_version_are_read_and_nothing_is_made_again(tmp_path: Path) -> None:
    before = own().run(tmp_path / "runs", progress=False)
    as_written_before(tmp_path / "runs")
    files = {path: path.read_bytes() for path in (tmp_path / "runs").glob("[rw]*/*")}
    assert len(files) == 6
    told = Told()
    assert own().run(tmp_path / "runs", progress=told).csv() == before.csv()
    assert told.texts == []
    assert {path: path.read_bytes() for path in (tmp_path / "runs").glob("[rw]*/*")} == files
    for path in (tmp_path / "runs").glob("rows/*"):
        path.unlink()
    assert own().run(tmp_path / "runs", progress=told).csv() == before.csv()
    assert told.texts == []
    # The definition is written anew, with a digest.
    assert "definition" not in " ".join(verify(tmp_path / "runs").notes)


def test_an_outcome_of_an_earlier_version_that_cannot_be_is_made_again(calm: Results, folder: Path) -> None:
    as_written_before(folder)
    without_rows(folder)
    outcomes = ["{", "[]", '{"status": "done"}', json.dumps({**OUTCOME, "test_error": "small"})]
    for key, outcome in zip(calm.rows, outcomes, strict=True):
        rewritten(folder / "weights" / f"{key}.safetensors", partial(dict.update, outcome=outcome))
    told = Told()
    assert study().run(folder, progress=told).csv() == calm.csv()
    assert len(told.texts) == 4


OUTCOME = {
    "status": "done",
    "epochs": 2,
    "train_loss": 1.0,
    "train_error": 0.5,
    "test_loss": 1.0,
    "test_error": 0.5,
    "train_examples": 200,
    "test_examples": 100,
    "parameters": 9,
    "norm": 1.0,
    "distance": 1.0,
}
FINISHED = {"outcome": {**OUTCOME, "curve": [1.0, 1.0], "notes": []}, "seconds": 1.0}


class Interrupting(Told):
    """Ctrl-C in the second epoch."""

    def update_epochs(self, done: int, most: int) -> None:
        if done == 2:
            raise KeyboardInterrupt


def begun(folder: Path) -> Path:
    """Leave a study in the middle of its first training, and return its checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        study().run(folder, progress=Interrupting(), every=0.0)
    (path,) = folder.glob("partial/*.safetensors")
    return path


SHAPES: dict[str, Any] = {
    "a list": [],
    "nothing": {},
    "lists for mappings": {"finished": [], "stacks": {}},
    "stacks of another kind": {"finished": {}, "stacks": [[]]},
    "a network twice": {"finished": {"0": FINISHED}, "stacks": [{"members": [0, 1], "epoch": 0}]},
    "texts for numbers": {"stacks": [{"members": ["0", "1"], "epoch": "1"}]},
    "another epoch": {"stacks": [{"epoch": 0}]},
    "another network": {"stacks": [{"members": [0, 7]}]},
    "fewer curves": {"stacks": [{"curves": [[1.0]]}]},
    "an outcome of another kind": {"finished": {"0": {"outcome": [], "seconds": 1.0}}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("earlier", [True, False], ids=["an earlier version", "this version"])
def test_a_checkpoint_with_facts_of_another_shape_is_not_used(
    shape: Any, earlier: bool, calm: Results, tmp_path: Path
) -> None:
    path = begun(tmp_path / "runs")
    if earlier:  # without a digest over them
        as_written_before(tmp_path / "runs")

    def change(facts: dict[str, str]) -> None:
        known = json.loads(facts["facts"])
        if isinstance(shape, dict) and shape:
            stacks = shape.get("stacks", known["stacks"])
            if isinstance(stacks, list) and isinstance(stacks[0], dict):
                stacks = [{**known["stacks"][0], **stacks[0]}]
            changed = {**known, **shape, "stacks": stacks}
        else:
            changed = shape
        facts["facts"] = json.dumps(changed)
        if not earlier:  # as if it had been written so
            facts.pop("digest")
            facts["digest"] = compute_digest(facts, load(path.read_bytes()))

    rewritten(path, change)
    told = Told()
    assert study().run(tmp_path / "runs", progress=told).csv() == calm.csv()
    assert study().run(tmp_path / "runs", progress=told).counts["failed"] == 0
    assert verify(tmp_path / "runs").problems == ()


@pytest.mark.parametrize("earlier", [True, False], ids=["an earlier version", "this version"])
def test_a_checkpoint_as_it_was_written_is_gone_on_from(
    earlier: bool, calm: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path / "runs")
    if earlier:
        as_written_before(tmp_path / "runs")
    epochs, epoch = [], BatchTrainer.train_epoch

    def watched(training: BatchTrainer) -> Any:
        epochs.append(training.batch.epoch)
        return epoch(training)

    monkeypatch.setattr(BatchTrainer, "train_epoch", watched)
    told = Told()
    assert study().run(tmp_path / "runs", progress=told).csv() == calm.csv()
    assert epochs == [1, 0, 1]  # the second epoch of the first group, and both of the second group
    assert told.texts == []


def test_one_bit_of_the_epoch_in_a_checkpoint_is_noticed(calm: Results, tmp_path: Path) -> None:
    path = begun(tmp_path / "runs")
    content = path.read_bytes()
    assert content.count(b'\\"epoch\\": 1') == 1
    path.write_bytes(content.replace(b'\\"epoch\\": 1', b'\\"epoch\\": 0'))
    told = Told()
    assert study().run(tmp_path / "runs", progress=told).csv() == calm.csv()
    (text,) = told.texts
    assert "it was changed after it was written" in text


OURS = (f"partial/{'0' * 16}.safetensors", "rows/x.json", "weights/x.safetensors")
PARTS = (".abc.part", "rows/.abc.part", "weights/.abc.part", "partial/.abc.part")
JUNK = {
    "a folder in partial": ("folder", ["partial/mine"]),
    "folders named like our files": ("folder", OURS),
    "folders named like half-written files": ("folder", PARTS),
    "pipes": ("pipe", [*OURS, *PARTS, "partial/mine"]),
    "links to nothing": ("link", [*OURS, *PARTS, "partial/mine"]),
    "files of somebody else": ("file", [*OURS, *PARTS, "partial/mine", "mine"]),
    "files for folders": ("file", ["rows", "weights", "partial"]),
    "no folders": ("nothing", ["rows", "weights", "partial"]),
    "a table that is a folder": ("folder", ["table.csv"]),
    "a table that is a pipe": ("pipe", ["table.csv"]),
    "a definition that is a folder": ("folder", ["study.json", "study.json.damaged"]),
}


@pytest.mark.parametrize(("what", "names"), JUNK.values(), ids=JUNK)
def test_junk_in_the_folder_is_no_obstacle(what: str, names: Sequence[str], calm: Results, folder: Path) -> None:
    for name in names:
        put(folder / name, what)
    for _ in range(2):
        assert study().run(folder, progress=False).csv() == calm.csv()
        assert (folder / "table.csv").read_text() == calm.csv()
    assert {each.file for each in verify(folder).problems} <= set(OURS)


def test_a_definition_that_was_set_aside_by_a_run_that_was_killed_then_is_made_again(
    calm: Results, folder: Path
) -> None:
    (folder / "study.json").rename(folder / "study.json.damaged")
    assert study().run(folder, progress=False).csv() == calm.csv()
    assert verify(folder).problems == ()


def test_folders_and_files_of_somebody_else_in_partial_are_left_alone(tmp_path: Path) -> None:
    study().run(tmp_path / "runs", progress=False)
    (tmp_path / "runs" / "partial" / "thesis.txt").write_text("mine")
    (tmp_path / "runs" / "partial" / "notes").mkdir()
    study().run(tmp_path / "runs", progress=False)
    assert sorted(path.name for path in (tmp_path / "runs" / "partial").iterdir()) == ["notes", "thesis.txt"]


@pytest.mark.parametrize("name", ["table.csv", "rows", "weights"])
def test_a_second_damage_of_one_name_has_room_beside_the_first(name: str, calm: Results, folder: Path) -> None:
    path = folder / name
    if path.is_dir():
        path = sorted(path.iterdir())[0]
    for _ in range(2):
        put(path, "folder")
        assert study().run(folder, progress=False).csv() == calm.csv()
    assert (path.with_name(path.name + ".damaged") / "inside").exists()
    assert (path.with_name(path.name + ".damaged.1") / "inside").exists()


def test_a_file_that_may_not_be_read_is_a_clear_error_and_not_set_aside(
    calm: Results, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sorted((folder / "weights").iterdir())[0]
    usual = Path.open

    def closed(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return usual(self, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", closed)
        with pytest.raises(StudyError, match=r"Expected a file that can be read.*\(Permission denied\)"):
            study().run(folder, progress=False)
        assert any("Permission denied" in note for note in verify(folder).notes)
    assert study().run(folder, progress=False).csv() == calm.csv()
    assert not list((folder).rglob("*.damaged"))
