"""The executor for Ray clusters, on a cluster of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import executor_cases as cases
import pytest
from executor_cases import Task, tasks, wait_until
from executor_laws import (
    LAWS_OF_RESULTS,
    LAWS_OF_RESULTS_ELSEWHERE,
    LAWS_OF_SESSIONS,
    LAWS_OF_SESSIONS_ELSEWHERE,
    Law,
    results,
)

from saltflat.studies.executors import ExecutorError, Failure, Ray, executor_named

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'saltflat[ray]'")

USING = """
from executor_cases import parent, tasks
from saltflat.studies.executors import executor_named

for task, result in executor_named("ray").run(tasks("a", "b"), parent):
    print(result, flush=True)
"""

STARTING = """
import os, signal, sys
from pathlib import Path
import ray
from executor_cases import endless, tasks
from saltflat.studies.executors import executor_named

executor, folder = executor_named("ray", workers=1), Path(sys.argv[1])
with executor.open() as session:
    session.submit(*tasks("quick"), endless)
    print([result for _, result in session.finished()], flush=True)
    sys.stdin.readline()
print(ray.is_initialized(), signal.getsignal(signal.SIGTERM).name, "RAY_USAGE_STATS_ENABLED" in os.environ, flush=True)
list(executor.run(tasks("slow", folder=folder), endless))
"""


@contextmanager
def started(script: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "script.py").write_text(script, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(folder / "script.py"), str(folder)],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a small cluster that was there before any executor."""
    handler, before = signal.getsignal(signal.SIGTERM), cases.descendants(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        context = ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield context.address_info["address"]
    started = cases.descendants(os.getpid()) - before
    assert started
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)
    wait_until(lambda: not any(cases.alive(pid) for pid in started), "Ray's processes were gone")


@pytest.mark.parametrize(
    "law",
    [*LAWS_OF_RESULTS, *LAWS_OF_SESSIONS, *LAWS_OF_RESULTS_ELSEWHERE, *LAWS_OF_SESSIONS_ELSEWHERE],
    ids=lambda law: law.__name__,
)
def test_ray_keeps_to_the_laws_and_a_cluster_that_was_there_stays(law: Law, address: str, tmp_path: Path) -> None:
    law(Ray(), tmp_path)
    assert ray.is_initialized()


def test_work_of_a_script_needs_no_module_under_ray(address: str) -> None:
    assert results(Ray(), tasks("a", "b"), lambda task: task.key * 2) == {"a": "aa", "b": "bb"}


def test_a_task_has_as_many_threads_as_cores_it_asked_for(address: str) -> None:
    given = [Task("one"), Task("two", resources={"cpus": 2}), Task("half", resources={"cpus": 0.5})]
    assert results(Ray(), given, cases.threads) == {"one": 1, "two": 2, "half": 1}


def test_a_task_that_asks_for_more_than_there_is_fails_and_does_not_wait(address: str) -> None:
    given = [
        Task("fits", resources={"cpus": 2}),
        Task("wide", resources={"cpus": 3}),
        Task("gpu", resources={"gpus": 1}),
        Task("odd", resources={"scanner": 1}),
        Task("less", resources={"cpus": -1}),
    ]
    found = results(Ray(), given, cases.upper)
    assert found.pop("fits") == "FITS"
    for key, words in {
        "wide": "needs {'CPU': 3, 'GPU': 0}, and no machine of the Ray cluster has that: the most of each is {'CPU': 2",
        "gpu": "the most of each is {'CPU': 2.0, 'GPU': 0}",
        "odd": "'scanner': 1",
        "less": "Want numbers that Ray takes",
    }.items():
        assert isinstance(found[key], Failure)
        assert words in found[key].error


def test_an_address_from_the_environment_is_used_and_its_cluster_left_running(address: str, tmp_path: Path) -> None:
    with started(USING, tmp_path, RAY_ADDRESS=address) as script:
        said, complained = script.communicate(timeout=cases.PATIENCE)
    assert complained == ""
    assert len(said.split()) == 2
    assert {int(pid) for pid in said.split()} <= cases.descendants(os.getpid()), "this cluster started the workers"
    assert results(Ray(), tasks("a"), cases.upper) == {"a": "A"}


def test_a_cluster_that_is_started_is_quiet_and_ends_with_the_session_or_when_the_script_is_killed(
    tmp_path: Path,
) -> None:
    with started(STARTING, tmp_path) as script:
        assert script.stdin is not None
        assert script.stdout is not None
        assert script.stdout.readline() == "['quick']\n"
        first = cases.descendants(script.pid)
        assert any(map(cases.alive, first))
        script.stdin.write("go on\n")
        script.stdin.flush()
        assert script.stdout.readline() == "False SIG_DFL False\n"
        wait_until(lambda: not any(map(cases.alive, first)), "the first cluster was gone")
        wait_until(lambda: bool(cases.pids(tmp_path)), "the slow task ran")
        cluster = cases.descendants(script.pid)
        assert cluster > cases.pids(tmp_path)
        script.kill()
        wait_until(lambda: not any(map(cases.alive, cases.pids(tmp_path))), "the worker ended")
        # Ray's agents look for their cluster once a minute and end then. The test does not wait for that.
        for pid in filter(cases.alive, cluster):
            os.kill(pid, signal.SIGKILL)
        assert script.communicate(timeout=cases.PATIENCE) == ("", "")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_named_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ExecutorError, match=f"refused from the Ray cluster at '{address}'. Want one that answers"):
        Ray(address=address).open()


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExecutorError, match=r"Do: pip install 'saltflat\[ray\]'"):
        executor_named("ray").open()
