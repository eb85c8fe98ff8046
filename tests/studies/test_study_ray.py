"""A study whose workers are killed in the middle of a training: the rows are those of one process, byte for byte."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executor_cases import alive, descendants, pids, wait_until
from study_cases import study
from waiting_cases import FOLDER, STEPS

from saltflat.errors import StudyError
from saltflat.studies import Results, Study
from saltflat.studies.executors import Executor, make_executor
from saltflat.studies.store.rows import row_to_dict


def chosen(own: bool) -> Study:
    """Four runs; ours are trained in two groups, in the third epoch of which a worker is killed."""
    changes: dict[str, Any] = {
        "network": "waiting_cases:network",
        "settings": {"batch_size": 50},
        "stop": {"epochs": 4},
    }
    if own:
        changes |= {"train": "waiting_cases:train", "settings": {}, "stop": {"epochs": STEPS + 5}}
    return study(**changes)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bytes can be compared where every process adds in the same order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told(results: Results) -> dict[str, Any]:
    """Every row but for what is of the clock and the machine."""
    plain = {key: row_to_dict(row) for key, row in results.rows.items()}
    return {
        key: {name: value for name, value in row.items() if name not in ("seconds", "made_with", "digest")}
        for key, row in plain.items()
    }


def run_and_killed(own: bool, executor: Executor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """Run with a worker killed that has told its number and waits in the middle of a training."""
    marks = folder / "marks"
    marks.mkdir()
    monkeypatch.setenv(FOLDER, str(marks))
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: bool(pids(marks)), "a worker waits")
        (pid,) = pids(marks)
        assert pid in descendants(os.getpid())
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    results = chosen(own).run(folder / "runs", executor, progress=False, every=0.0)
    killer.join()
    assert len(killed) == 1
    assert not alive(killed[0])
    return results


def assert_as_in_one_process(found: Results, own: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    wanted = chosen(own).run(folder / "calm", progress=False)
    assert wanted.counts["done"] == 4
    assert told(found) == told(wanted)
    assert (found.folder / "table.csv").read_bytes() == (wanted.folder / "table.csv").read_bytes()


def test_processes_of_which_one_is_killed_in_the_users_training_give_the_rows_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_and_killed(True, make_executor("processes", workers=2), tmp_path, monkeypatch)
    assert_as_in_one_process(found, True, tmp_path, monkeypatch)


def test_a_ray_cluster_of_which_a_worker_is_killed_in_our_training_gives_the_rows_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install ray")
    before = descendants(os.getpid())
    found = run_and_killed(False, make_executor("ray", workers=2), tmp_path, monkeypatch)
    assert not ray.is_initialized()
    assert_as_in_one_process(found, False, tmp_path, monkeypatch)
    wait_until(lambda: not any(map(alive, descendants(os.getpid()) - before)), "Ray's processes were gone")


def test_a_raylet_killed_twice_fails_no_run_and_the_same_command_ends_with_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install ray")
    # Ray notices within seconds that a node is dead, not within a quarter of a minute.
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "2")
    before = descendants(os.getpid())
    for life in ("first", "second"):
        marks = tmp_path / life
        marks.mkdir()
        monkeypatch.setenv(FOLDER, str(marks))
        killer = threading.Thread(target=kill_raylet, args=(marks, before))
        killer.start()
        # One core: while a training waits, all else waits behind it.
        with pytest.raises(
            StudyError, match=r"a local Ray cluster .*lost it: .*All finished runs are kept: run the same command"
        ):
            chosen(False).run(tmp_path / "runs", make_executor("ray", workers=1), progress=False, every=0.0)
        killer.join()
        assert not any(map(alive, descendants(os.getpid()) - before)), "the training that waited among them"
        assert Results.load(tmp_path / "runs").counts["failed"] == 0
    monkeypatch.delenv(FOLDER)
    found = chosen(False).run(tmp_path / "runs", make_executor("ray", workers=1), progress=False)
    assert_as_in_one_process(found, False, tmp_path, monkeypatch)


def kill_raylet(marks: Path, before: set[int]) -> None:
    wait_until(lambda: bool(pids(marks)), "a worker waits")
    raylets = [pid for pid in descendants(os.getpid()) - before if b"raylet/raylet" in arguments(pid)]
    assert len(raylets) == 1
    os.kill(raylets[0], signal.SIGKILL)


def arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:  # gone meanwhile
        return b""
