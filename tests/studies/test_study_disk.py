"""Folders that are full, closed, or used by somebody else: one clear error, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_cases import study

from saltflat.errors import SaltflatError, StudyError
from saltflat.studies import Results, verify
from saltflat.studies.store.checkpoint import Checkpoint, read_matching_checkpoint, write_checkpoint
from saltflat.studies.store.lock import is_locked, lock_folder

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


class Full:
    """A disk with room for so many more files."""

    def __init__(self, room: int, number: int) -> None:
        self.room, self.number = room, number

    def opened(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "x" in mode or "w" in mode:
                self.room -= 1
                if self.room < 0:
                    raise OSError(self.number, os.strerror(self.number), str(path))
            return usual(path, mode, *arguments, **options)

        return opening


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_is_full_at_any_file_gives_one_clear_error_and_loses_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = study().run(tmp_path / "calm", progress=False)
    kept: dict[str, bytes] = {}
    for room in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", Full(room, number).opened(Path.open))
            try:
                study().run(tmp_path / "runs", progress=False)
                break
            except StudyError as problem:
                told = str(problem)
        assert os.strerror(number) in told
        assert "same command again" in told
        rows = {path.name: path.read_bytes() for path in (tmp_path / "runs" / "rows").glob("*.json")}
        assert kept.items() <= rows.items()
        assert not list((tmp_path / "runs").rglob("*.part"))
        kept = rows
    else:
        pytest.fail("the study never came to its end")
    assert (tmp_path / "runs" / "table.csv").read_text() == calm.csv()


def test_files_that_may_not_grow_are_a_clear_error_and_the_study_goes_on_afterwards(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    script = f"""
        import resource
        from study_cases import study
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, {resource.RLIM_INFINITY}))
        study().run({str(tmp_path / "runs")!r}, progress=False)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "StudyError" in done.stderr
    assert "cannot be written (File too large)" in done.stderr
    assert study().run(tmp_path / "runs", progress=False).counts["done"] == 4


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs users")
def test_a_folder_that_may_only_be_read_is_a_clear_error_and_can_be_looked_at(tmp_path: Path) -> None:
    results = study().run(tmp_path / "runs", progress=False)
    script = f"""
        import os
        from typer.testing import CliRunner
        from saltflat.cli import app
        from study_cases import study
        def status():
            return CliRunner().invoke(app, ["study", "status", {str(tmp_path / "runs")!r}])
        status(), study().data.examples()  # all that is imported is, while we still may read it
        if os.geteuid() == 0:  # whom nothing stops
            os.setgid(65534)
            os.setuid(65534)
        try:
            study(axes={{"lr": [0.3]}}).run({str(tmp_path / "runs")!r}, progress=False)
        except Exception as problem:
            print(type(problem).__name__, problem)
        found = status()
        print(found.output, repr(found.exception))
    """
    for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    # pytest's own folders are closed to others.
    opened = [each for each in tmp_path.parents if each.exists() and not each.stat().st_mode & 0o001]
    modes = {each: each.stat().st_mode for each in [*opened, tmp_path]}
    try:
        for each in modes:
            each.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    finally:
        for each, mode in modes.items():
            each.chmod(mode)
        for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert "StudyError" in done.stdout, done.stdout + done.stderr
    assert "cannot be written (Permission denied)" in done.stdout
    assert "4 done" in done.stdout
    assert Results.load(tmp_path / "runs").rows == results.rows


def test_two_studies_do_not_share_a_folder(tmp_path: Path) -> None:
    script = f"""
        import sys, time
        from saltflat.studies import tasks
        from study_cases import study
        measure = tasks.measure_run
        def slow(task, context):
            print("measuring", flush=True)
            sys.stdin.readline()
            return measure(task, context)
        tasks.measure_run = slow
        study().run({str(tmp_path / "runs")!r}, progress=False)
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "measuring\n"
        began = time.perf_counter()
        with pytest.raises(StudyError, match=rf"process {other.pid} on .* is working in"):
            study().run(tmp_path / "runs", progress=False)
        assert time.perf_counter() - began < 5
        assert is_locked(tmp_path / "runs")
        assert Results.load(tmp_path / "runs").counts["missing"] == 4
        other.stdin.write("\n" * 10)
        other.stdin.flush()
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.communicate()
    assert not is_locked(tmp_path / "runs")
    assert study().run(tmp_path / "runs", progress=False).counts["done"] == 4


def test_a_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path):
        raise ZeroDivisionError
    assert not is_locked(tmp_path)
    with lock_folder(tmp_path), pytest.raises(SaltflatError, match=f"process {os.getpid()}"), lock_folder(tmp_path):
        pass


def test_a_lock_without_words_is_a_lock_all_the_same(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        (tmp_path / ".lock").write_text("")
        with pytest.raises(SaltflatError, match="another process"), lock_folder(tmp_path):
            pass


def test_a_disk_that_is_really_full_is_a_clear_error_and_the_study_goes_on_with_more_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        with pytest.raises(StudyError, match=r"cannot be written \(No space left on device\).*same command again"):
            study().run(disk / "runs", progress=False)
        kept = {path.name: path.read_bytes() for path in (disk / "runs").rglob("*.safetensors")}
        assert kept  # it was not the first file that did not fit
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        results = study().run(disk / "runs", progress=False)
        assert results.counts["done"] == 4
        after = {path.name: path.read_bytes() for path in (disk / "runs" / "weights").iterdir()}
        assert {name: text for name, text in kept.items() if name in after}.items() <= after.items()
        assert study().run(tmp_path / "calm", progress=False).csv() == results.csv()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def linked(path: Path, target: Path) -> None:
    """Put a link to a file of somebody else at a place."""
    target.write_text("precious")
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["rows", "weights", "study.json", "table.csv"])
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_written_through(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    before = study().run(folder, progress=False).csv()
    path = folder / name
    if path.is_dir():
        path = sorted(path.iterdir())[0]
    linked(path, tmp_path / "precious")
    assert study().run(folder, progress=False).csv() == before
    assert (tmp_path / "precious").read_text() == "precious"
    assert path.is_file()
    assert not path.is_symlink()
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    assert study().run(folder, progress=False).csv() == before
    assert not (tmp_path / "nothing").exists()


def test_a_link_to_a_whole_row_is_read_and_replaced_when_the_row_is_added_to(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    before = study().run(folder, progress=False)
    path = sorted((folder / "rows").iterdir())[0]
    kept = path.rename(tmp_path / "row.json").read_bytes()
    path.symlink_to(tmp_path / "row.json")
    assert study().run(folder, progress=False).csv() == before.csv()
    assert path.is_symlink()
    more = study(measures=["squared_norm", "distance_from_init", "hessian_trace", "fisher_trace"])
    assert more.run(folder, progress=False).counts["done"] == 4
    assert not path.is_symlink()
    assert (tmp_path / "row.json").read_bytes() == kept


def test_a_link_in_the_place_of_a_checkpoint_is_not_written_through(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    linked(path, tmp_path / "precious")
    write_checkpoint(path, "who", Checkpoint({"epoch": 0, "curve": [], "seconds": 0.0}, {}))
    assert (tmp_path / "precious").read_text() == "precious"
    assert read_matching_checkpoint(path, "who") is not None


@pytest.mark.parametrize("name", ["rows", "weights", "partial"])
def test_a_link_in_the_place_of_a_folder_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "runs", tmp_path / "other"
    study().run(folder, progress=False)
    (folder / name).rename(other)
    (other / f"{'0' * 16}.safetensors").write_text("precious")
    (other / ".mine.part").write_text("precious")
    (folder / name).symlink_to(other)
    kept = {path.name: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(StudyError, match=f"Expected '.*{name}' to be a folder, but it is a link"):
        study().run(folder, progress=False)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == kept
    assert name in {each.file for each in verify(folder).problems}


def test_a_study_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "large")
    results = study().run(tmp_path / "runs", progress=False)
    assert results.counts["done"] == 4
    assert (tmp_path / "large" / "table.csv").read_text() == results.csv()
    assert verify(tmp_path / "runs").problems == ()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("precious"), Path.mkdir, os.mkfifo])
def test_a_lock_that_is_no_file_is_refused_and_not_written_through(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    make(folder / ".lock")
    assert not is_locked(folder)
    with (
        pytest.raises(StudyError, match=r"Expected .*\.lock' to be a regular file.*Try removing it"),
        lock_folder(folder),
    ):
        pass
    assert (folder / "precious").read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    script = f"""
        import os, signal, sys, time
        from pathlib import Path
        from saltflat.studies.store import lock_folder
        try:
            with lock_folder(Path({str(tmp_path)!r})):
                if os.fork() == 0:
                    raise ZeroDivisionError  # leaves the lock of its parent alone
                assert os.wait()[1] == 0
                if os.fork():
                    signal.pause()
                os.write(1, b"%d\\n" % os.getpid())
                time.sleep(60)
        except ZeroDivisionError:
            os._exit(0)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert is_locked(tmp_path)
        finally:
            parent.kill()
    try:
        os.kill(child, 0)  # it still lives
        assert not is_locked(tmp_path)
        with lock_folder(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_those_who_only_look_never_make_a_study_refuse(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        pass
    looking = [threading.Event() for _ in range(4)]
    over = threading.Event()
    seen = []

    def look(begun: threading.Event) -> None:
        while not over.is_set():
            seen.append(is_locked(tmp_path))
            begun.set()

    threads = [threading.Thread(target=look, args=[each]) for each in looking]
    for each in threads:
        each.start()
    try:
        assert all(each.wait(10) for each in looking)
        for _ in range(300):
            with lock_folder(tmp_path):
                pass
    finally:
        over.set()
        for each in threads:
            each.join()
    # They met each other: else this shows little.
    assert any(seen)
    assert not all(seen)


def test_a_study_waits_for_one_who_looks_and_refuses_at_once_where_another_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    with lock_folder(tmp_path):
        began = time.perf_counter()
        with pytest.raises(StudyError, match="is working in"), lock_folder(tmp_path):
            pass
        assert time.perf_counter() - began < 1
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.3, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        with lock_folder(tmp_path):
            pass
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr("saltflat.studies.store.lock.PATIENCE", 0.1)  # it was stopped while it looked
        with pytest.raises(StudyError, match="is working in"), lock_folder(tmp_path):
            pass


@pytest.mark.parametrize("change", [{"study": None}, {"study": {}}, {"data": "abc"}, {"keys": None}, {"keys": []}])
def test_a_definition_of_another_kind_is_one_clear_error_and_made_again(change: dict[str, Any], tmp_path: Path) -> None:
    before = study().run(tmp_path / "runs", progress=False).csv()
    path = tmp_path / "runs" / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StudyError, match="Try saltflat study run again"):
        Results.load(tmp_path / "runs")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "digest"}))
    with pytest.raises(StudyError, match=r"is missing or of another kind|does not match its rows"):
        Results.load(tmp_path / "runs")
    assert study().run(tmp_path / "runs", progress=False).csv() == before
    assert Results.load(tmp_path / "runs").csv() == before
