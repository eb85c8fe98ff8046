"""The executor for Ray clusters, on a cluster of this machine."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import executor_cases as cases
import pytest
from executor_cases import Task, tasks, wait_until
from executor_laws import (
    LAWS_OF_RESULTS,
    LAWS_OF_RESULTS_ELSEWHERE,
    LAWS_OF_SESSIONS,
    LAWS_OF_SESSIONS_ELSEWHERE,
    Kept,
    Law,
    results,
)

from saltflat.studies.executors import Executor, ExecutorError, Failure, RayExecutor, make_executor
from saltflat.studies.executors.ray_driver import RayDriver

ray = pytest.importorskip("ray", reason="needs Ray: pip install ray")

USING = """
from executor_cases import parent, tasks
from saltflat.studies.executors import make_executor

for task, result in make_executor("ray").run(tasks("a", "b"), parent):
    print(result, flush=True)
"""

STARTING = """
import os, signal, sys
from pathlib import Path
import ray
from executor_cases import endless, tasks
from saltflat.studies.executors import make_executor

executor, folder = make_executor("ray", workers=1), Path(sys.argv[1])
with executor.open_session() as session:
    session.submit(*tasks("quick"), endless)
    print([result for _, result in session.iter_results()], flush=True)
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


@pytest.fixture(scope="module")
def kept(address: str) -> Iterator[Executor]:
    with RayExecutor().open_session() as session:
        yield Kept(session)


@pytest.mark.parametrize("law", [*LAWS_OF_RESULTS, *LAWS_OF_RESULTS_ELSEWHERE], ids=lambda law: law.__name__)
def test_ray_keeps_to_the_laws_of_results(law: Law, kept: Executor, tmp_path: Path) -> None:
    law(kept, tmp_path)


@pytest.mark.parametrize("law", [*LAWS_OF_SESSIONS, *LAWS_OF_SESSIONS_ELSEWHERE], ids=lambda law: law.__name__)
def test_ray_keeps_to_the_laws_of_sessions_and_a_cluster_that_was_there_stays(
    law: Law, address: str, tmp_path: Path
) -> None:
    law(RayExecutor(), tmp_path)
    assert ray.is_initialized()


def test_work_of_a_script_needs_no_module_under_ray(kept: Executor) -> None:
    assert results(kept, tasks("a", "b"), lambda task: task.key * 2) == {"a": "aa", "b": "bb"}


def test_a_task_has_as_many_threads_as_cores_it_asked_for(kept: Executor) -> None:
    given = [Task("one"), Task("two", resources={"cpus": 2}), Task("half", resources={"cpus": 0.5})]
    assert results(kept, given, cases.threads) == {"one": 1, "two": 2, "half": 1}


def test_a_task_that_asks_for_more_than_there_is_fails_and_does_not_wait(kept: Executor) -> None:
    given = [
        Task("fits", resources={"cpus": 2}),
        Task("wide", resources={"cpus": 3}),
        Task("gpu", resources={"gpus": 1}),
        Task("odd", resources={"scanner": 1}),
        Task("less", resources={"cpus": -1}),
    ]
    found = results(kept, given, cases.upper)
    assert found.pop("fits") == "FITS"
    for key, words in {
        "wide": "needs {'CPU': 3, 'GPU': 0}, and no machine of the Ray cluster has that: the most of each is {'CPU': 2",
        "gpu": "the most of each is {'CPU': 2.0, 'GPU': 0}",
        "odd": "'scanner': 1",
        "less": "Expected numbers that Ray accepts",
    }.items():
        assert isinstance(found[key], Failure)
        assert words in found[key].error


def test_an_address_from_the_environment_is_used_and_its_cluster_left_running(address: str, tmp_path: Path) -> None:
    with started(USING, tmp_path, RAY_ADDRESS=address) as script:
        said, complained = script.communicate(timeout=cases.PATIENCE)
    assert complained == ""
    assert len(said.split()) == 2
    assert {int(pid) for pid in said.split()} <= cases.descendants(os.getpid()), "this cluster started the workers"
    assert ray.cluster_resources()["CPU"] == 2


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
        time.sleep(1.0)
        assert not any(map(cases.alive, cluster)), "workers, and what else Ray started"
        assert script.communicate(timeout=cases.PATIENCE) == ("", "")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_named_at_once(address: str) -> None:
    with pytest.raises(
        ExecutorError, match=f"the Ray cluster at '{address}', but got ConnectionRefusedError: .* refused"
    ):
        RayExecutor(address=address).open_session()


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


def test_a_cluster_that_does_not_start_in_time_is_one_clear_error_and_leaves_nothing(
    unconnected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cases.descendants(os.getpid())
    monkeypatch.setattr("saltflat.studies.executors.ray.START_TIMEOUT", 0.05)
    with pytest.raises(
        ExecutorError, match=r"local Ray cluster to start, but got none within 0\.05 seconds\. Try again"
    ):
        RayExecutor(workers=1).open_session()
    assert not any(map(cases.alive, cases.descendants(os.getpid()) - before))


def test_what_ray_says_when_it_cannot_start_is_one_clear_error(unconnected: None) -> None:
    with pytest.raises(ExecutorError, match=r"local Ray cluster to start, but got ValueError: .*nowhere.*\. Try again"):
        RayExecutor(workers=1, runtime_env={"working_dir": "nowhere"}).open_session()


def errors_of_ray() -> list[type[Exception]]:
    found = [each for each in vars(ray.exceptions).values() if isinstance(each, type)]
    return [each for each in found if issubclass(each, ray.exceptions.RayError) and each.__name__ != "RayTaskError"]


def fake_ray() -> ModuleType:
    """Return a module with Ray's exceptions that starts nothing."""
    module = ModuleType("ray")
    vars(module).update(exceptions=ray.exceptions, remote=lambda run: run)
    return module


@pytest.mark.parametrize("kind", errors_of_ray(), ids=lambda kind: kind.__name__)
def test_of_rays_errors_only_a_dead_worker_is_held_against_a_task(kind: type[Exception]) -> None:
    said: list[tuple[object, ...]] = []
    driver = RayDriver(fake_ray(), said.append, [], False)
    driver._pop_timeout_mark = lambda mark: mark == "late"  # type: ignore[method-assign]
    future: Future[bytes] = Future()
    future.set_exception(kind.__new__(kind))
    driver.report_result(7, "", future)
    driver.report_result(7, "late", future)
    if kind.__name__ in ("WorkerCrashedError", "OutOfMemoryError"):
        assert said == [("died", 7, said[0][2]), ("timed out", 7)]
    else:
        assert {word for word, *_ in said} == {"gone" if kind.__name__ == "LocalRayletDiedError" else "lost"}


def test_a_task_that_could_not_read_its_work_is_not_to_blame() -> None:
    said: list[tuple[object, ...]] = []
    driver = RayDriver(fake_ray(), said.append, [], False)
    gone = ray.exceptions.ObjectLostError("00ff", None, "")
    for cause in (gone, ModuleNotFoundError("No module named 'saltflat'")):
        future: Future[bytes] = Future()
        future.set_exception(ray.exceptions.RayTaskError("run", "Traceback", cause))
        driver.report_result(7, "", future)
    assert said[0][:2] == ("lost", 7)
    assert said[1] == ("not found", 7, "ModuleNotFoundError: No module named 'saltflat'", said[1][3])


class Scripted:
    """In place of a driver: answers each task as its key says, one word after another, and at last with a result."""

    address, cpus = None, 2

    def __init__(self, words: dict[str, list[str]]) -> None:
        self.words, self.answers = {key: deque(each) for key, each in words.items()}, deque[tuple[object, ...]]()

    def send(self, command: dict[str, Any]) -> None:
        key = pickle.loads(command["task"]).key
        word = self.words[key].popleft() if self.words.get(key) else "result"
        said = {"result": (pickle.dumps(key),), "died": ("why",), "lost": ("why",)}[word]
        self.answers.append((word, command["job"], *said))

    def receive(self) -> tuple[object, ...]:
        if not self.answers:
            raise EOFError
        return self.answers.popleft()

    def close(self) -> None: ...


def scripted(monkeypatch: pytest.MonkeyPatch, **words: list[str]) -> Executor:
    monkeypatch.setattr("saltflat.studies.executors.ray._DriverProcess", lambda setup: Scripted(words))
    return RayExecutor(workers=1)


def test_a_task_that_lost_its_machine_twice_is_done_by_another(
    unconnected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = scripted(monkeypatch, a=["lost", "lost"], b=["died", "lost", "died", "lost"])
    assert results(executor, tasks("a", "b", "c"), cases.upper) == {"a": "a", "b": "b", "c": "c"}


def test_a_task_that_loses_every_machine_ends_the_session_and_does_not_fail(
    unconnected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = scripted(monkeypatch, b=["lost"] * 3).run(tasks("a", "b"), cases.upper)
    assert next(running)[1] == "a"
    with pytest.raises(
        ExecutorError, match=r"a local Ray cluster until .*but lost it: why\. No task is marked as failed"
    ):
        next(running)


def test_a_cluster_that_ends_the_process_connected_to_it_fails_no_task(
    unconnected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = scripted(monkeypatch)
    monkeypatch.setattr(Scripted, "send", lambda self, command: None)
    with pytest.raises(ExecutorError, match="lost it: Ray ended the process that was connected to it"):
        list(executor.run(tasks(*range(24)), cases.upper))


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExecutorError, match=r"Expected Ray for the executor 'ray', .*Try pip install ray, or"):
        make_executor("ray").open_session()
