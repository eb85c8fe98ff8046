"""Rows in one compressed file: read as before, the same bytes from the same rows, and damage is noticed."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
import study_cases

from saltflat.errors import StudyError
from saltflat.studies import Results, pack_rows, verify
from saltflat.studies.store.lock import lock_folder
from saltflat.studies.store.packed_rows import PACKED


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    study_cases.study().run(folder, progress=False)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    for name in ("rows", "weights", "partial"):
        (tmp_path / name).mkdir()
    for path in original.rglob("*.*"):
        (tmp_path / path.relative_to(original)).write_bytes(path.read_bytes())
    return tmp_path


def test_packed_rows_are_read_as_before_and_nothing_runs_again(folder: Path) -> None:
    before = Results.load(folder)
    sizes = sum(path.stat().st_size for path in (folder / "rows").iterdir())
    packed = pack_rows(folder)
    assert not list((folder / "rows").iterdir())
    assert packed.stat().st_size < sizes / 3
    after = Results.load(folder)
    assert after.rows == before.rows
    assert after.csv() == before.csv()
    checked = verify(folder)
    assert not checked.problems
    assert checked.checked["packed row"] == len(before.rows)
    assert not any("rows.tar.xz" in note for note in checked.notes)
    for path in (folder / "weights").iterdir():
        path.unlink()
    study_cases.study().run(folder, progress=False)
    assert not [*(folder / "rows").iterdir(), *(folder / "weights").iterdir()], "nothing is trained again"
    more = study_cases.study(seeds=2).run(folder, progress=False)
    assert len(list((folder / "rows").iterdir())) == len(more.rows) - len(before.rows) == 4
    first = packed.read_bytes()
    assert pack_rows(folder).read_bytes() != first
    assert Results.load(folder).rows == more.rows


def test_the_same_rows_give_the_same_bytes(folder: Path) -> None:
    once = pack_rows(folder).read_bytes()
    assert pack_rows(folder).read_bytes() == once


def test_a_row_beside_the_packed_ones_comes_first(folder: Path) -> None:
    texts = {path: path.read_bytes() for path in (folder / "rows").iterdir()}
    pack_rows(folder)
    path, text = next(iter(texts.items()))
    path.write_bytes(text)
    assert len(Results.load(folder).rows) == len(texts)
    path.write_bytes(text.replace(b'"epochs": 2', b'"epochs": 3'))
    damaged = Results.load(folder)
    assert len(damaged.rows) == len(texts) - 1
    assert path.name in damaged.notes[0]


def write_archive(path: Path, name: str, text: bytes) -> None:
    with tarfile.open(path, "w:xz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))


def assert_unreadable(folder: Path, told: str) -> None:
    results = Results.load(folder)
    assert not results.rows
    assert any(told in note for note in results.notes)


def test_damage_is_noticed_and_what_was_in_the_file_is_made_again(folder: Path) -> None:
    before = Results.load(folder)
    packed = pack_rows(folder)
    whole = packed.read_bytes()
    key = next(iter(before.rows))
    for damaged in (whole[: len(whole) // 2], b"nothing"):
        packed.write_bytes(damaged)
        assert_unreadable(folder, PACKED)
        assert PACKED in [problem.file for problem in verify(folder).problems]
    write_archive(packed, f"{key}.json", b'{"schema": "saltflat.row/2"}')
    assert_unreadable(folder, key)
    write_archive(packed, "../outside.txt", b"")
    assert_unreadable(folder, "not a row")
    packed.write_bytes(whole[: len(whole) // 2])
    again = study_cases.study().run(folder, progress=False)
    assert again.csv() == before.csv()
    assert packed.with_name(f"{PACKED}.damaged").exists()


def test_one_damaged_row_costs_that_row_alone(folder: Path) -> None:
    before = Results.load(folder)
    packed = pack_rows(folder)
    with tarfile.open(packed) as archive:
        texts = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    name = next(iter(texts))
    with tarfile.open(packed, "w:xz") as archive:
        for each, text in texts.items():
            member = tarfile.TarInfo(each)
            member.size = len(text) - 50 * (each == name)
            archive.addfile(member, io.BytesIO(text))
    with pytest.raises(StudyError, match=f"the row '{name[:5]}"):
        pack_rows(folder)
    assert study_cases.study().run(folder, progress=False).csv() == before.csv()
    kept = {path.name: path.read_bytes() for path in (folder / "rows").iterdir()}
    assert kept.keys() == texts.keys()
    assert all(kept[each] == text for each, text in texts.items() if each != name)


def test_what_is_no_file_of_rows_is_set_aside_and_made_again(folder: Path) -> None:
    before = Results.load(folder)
    packed = pack_rows(folder)
    for make in (Path.mkdir, os.mkfifo):
        packed.unlink()
        make(packed)
        assert_unreadable(folder, PACKED)
        assert "sets it aside" in verify(folder).problems[0].rerun
        with pytest.raises(StudyError, match=PACKED):
            pack_rows(folder)
        assert study_cases.study().run(folder, progress=False).csv() == before.csv()
        pack_rows(folder)
    packed.unlink()
    packed.symlink_to(folder / "elsewhere")
    study_cases.study().run(folder, progress=False)
    assert not pack_rows(folder).is_symlink()


def test_damaged_rows_are_not_packed_and_stay(folder: Path) -> None:
    path = sorted((folder / "rows").iterdir())[0]
    whole = path.read_bytes()
    for damaged in (whole[:50], whole.replace(b'"epochs": 2', b'"epochs": 3'), b"[]"):
        path.write_bytes(damaged)
        with pytest.raises(StudyError, match=path.name):
            pack_rows(folder)
        assert path.read_bytes() == damaged
        assert not (folder / PACKED).exists()


def test_a_folder_that_is_in_use_is_not_packed(folder: Path) -> None:
    with lock_folder(folder), pytest.raises(StudyError, match="that no process uses"):
        pack_rows(folder)
    assert not (folder / PACKED).exists()


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="Expected a folder with rows"):
        pack_rows(tmp_path)
