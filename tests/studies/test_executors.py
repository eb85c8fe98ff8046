"""Executors in this process and in local ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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

from saltflat.errors import OptionError, UnknownNameError
from saltflat.studies.executors import (
    Executor,
    ExecutorError,
    ProcessExecutor,
    RayExecutor,
    SerialExecutor,
    make_executor,
)
from saltflat.studies.executors.processes import count_cores
from saltflat.studies.runner import select_executor

SCRIPT = """
import sys
from pathlib import Path
from executor_cases import endless, tasks
from saltflat.studies.executors import ProcessExecutor

folder = Path(sys.argv[1])
if __name__ == "__main__":
    for task, result in ProcessExecutor(workers=2).run(tasks("a", "b", folder=folder), endless):
        print(result)
"""

# Its workers never get beyond importing the script.
STARTING = SCRIPT.replace("import sys\n", "import os, sys, time\n").replace(
    'if __name__ == "__main__":',
    '(folder / f"pid-{os.getpid()}").touch()\nif __name__ != "__main__":\n    time.sleep(60)\nelse:',
)
# Its workers keep Python's lock, and it forks a process, which holds open what the parent had open.
FORKING = (
    SCRIPT.replace("import sys\n", "import os, sys, threading, time\n")
    .replace("endless", "stuck")
    .replace(
        'if __name__ == "__main__":',
        """def fork():
    while len(list(folder.glob("pid-*"))) < 2:
        time.sleep(0.02)
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    (folder / f"fork-{child}").touch()

if __name__ == "__main__":
    threading.Thread(target=fork).start()""",
    )
)


@contextmanager
def started(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A script in a process group of its own, as a terminal starts one."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(folder / "script.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture(scope="module")
def kept() -> Iterator[Executor]:
    with ProcessExecutor(workers=2).open_session() as session:
        yield Kept(session)


def of(law: Law) -> str:
    return law.__name__


@pytest.mark.parametrize("law", [*LAWS_OF_RESULTS, *LAWS_OF_SESSIONS], ids=of)
def test_the_serial_executor_keeps_to_the_laws(law: Law, tmp_path: Path) -> None:
    law(SerialExecutor(), tmp_path)


@pytest.mark.parametrize("law", [*LAWS_OF_RESULTS, *LAWS_OF_RESULTS_ELSEWHERE], ids=of)
def test_local_processes_keep_to_the_laws_of_results(law: Law, kept: Executor, tmp_path: Path) -> None:
    law(kept, tmp_path)


@pytest.mark.parametrize("law", [*LAWS_OF_SESSIONS, *LAWS_OF_SESSIONS_ELSEWHERE], ids=of)
def test_local_processes_keep_to_the_laws_of_sessions(law: Law, tmp_path: Path) -> None:
    law(ProcessExecutor(workers=2), tmp_path)


def test_the_serial_executor_does_nothing_before_a_result_is_requested() -> None:
    taken: list[str] = []
    done: list[str] = []

    def coming() -> Iterator[Task]:
        for task in tasks("a", "b"):
            taken.append(task.key)
            yield task

    running = SerialExecutor().run(coming(), lambda task: done.append(task.key))
    assert (taken, done) == ([], [])
    next(running)
    assert (taken, done) == (["a"], ["a"])
    next(running)
    assert (taken, done) == (["a", "b"], ["a", "b"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_sys_exit_end_the_serial_executor(error: type[BaseException]) -> None:
    def work(task: Task) -> None:
        raise error

    with pytest.raises(error):
        list(SerialExecutor().run(tasks("a"), work))


def test_the_serial_executor_cannot_stop_its_work_and_rejects_a_time_limit() -> None:
    with pytest.raises(OptionError, match=r"got timeout=3\.0 with executor='serial'.*Try executor='processes'"):
        list(SerialExecutor().run(tasks("a"), cases.upper, timeout=3.0))


def test_something_else_than_an_executor_is_refused() -> None:
    with pytest.raises(OptionError, match=r"Expected a name or an executor, but got None\. Try 'serial'"):
        select_executor(None, None)  # type: ignore[arg-type]


def test_a_machine_that_starts_no_more_processes_ends_the_session_and_fails_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("saltflat.studies.executors.processes.SpawnProcess.start", refuse)
    with pytest.raises(
        ExecutorError, match=r"a new one cannot be started .*temporarily unavailable.*No task is marked"
    ):
        list(ProcessExecutor(workers=1).run(tasks("a"), cases.upper))


def test_work_that_cannot_be_imported_elsewhere_fails_with_what_to_do() -> None:
    found = results(ProcessExecutor(workers=1), tasks("a"), lambda task: task.key)
    assert "cannot be sent to another process" in found["a"].error
    assert 'Try putting it at the top of a module, named as "package.module:function"' in found["a"].error


@pytest.mark.skipif(count_cores() < 2, reason="needs two cores to share")
def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert results(ProcessExecutor(count_cores()), tasks("a"), cases.threads) == {"a": 1}


@pytest.mark.parametrize("script", [STARTING, FORKING], ids=["starting", "stuck"])
def test_workers_end_within_a_second_of_a_parent_that_is_killed(script: str, tmp_path: Path) -> None:
    with started(script, tmp_path) as parent:
        wait_until(lambda: len(cases.pids(tmp_path) - {parent.pid}) == 2, "both workers ran")
        wait_until(lambda: script != FORKING or any(tmp_path.glob("fork-*")), "the parent forked")
        workers, forks = cases.pids(tmp_path) - {parent.pid}, [int(each.name[5:]) for each in tmp_path.glob("fork-*")]
        assert all(map(cases.alive, workers))
        parent.kill()
        time.sleep(1.0)
        left = [pid for pid in workers if cases.alive(pid)]
        for pid in [*left, *forks]:
            os.kill(pid, signal.SIGKILL)
        assert left == []


def test_ctrl_c_ends_the_workers_at_once_and_only_the_parent_speaks(tmp_path: Path) -> None:
    with started(SCRIPT, tmp_path) as script:
        wait_until(lambda: len(cases.pids(tmp_path)) == 2, "both workers ran")
        pressed = time.monotonic()
        os.killpg(script.pid, signal.SIGINT)
        _, said = script.communicate(timeout=cases.PATIENCE)
        assert time.monotonic() - pressed < 3
    assert said.count("KeyboardInterrupt") == 1
    assert not any(cases.alive(pid) for pid in cases.pids(tmp_path))


def test_ctrl_c_while_workers_start_ends_them_too(tmp_path: Path) -> None:
    with started(STARTING, tmp_path) as script:
        wait_until(lambda: len(cases.pids(tmp_path)) == 3, "the workers began to start")
        for pid in cases.pids(tmp_path) - {script.pid}:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
        assert all(map(cases.alive, cases.pids(tmp_path))), "that is for the parent to decide"
        os.killpg(script.pid, signal.SIGINT)
        _, said = script.communicate(timeout=cases.PATIENCE)
    assert said.count("KeyboardInterrupt") == 1
    assert not any(cases.alive(pid) for pid in cases.pids(tmp_path))


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    with started(SCRIPT.replace('if __name__ == "__main__":', "if True:"), tmp_path) as script:
        _, said = script.communicate(timeout=cases.PATIENCE)
    assert script.returncode == 1
    assert 'Try putting what the script does under `if __name__ == "__main__":`' in said.splitlines()[-1]


def test_a_session_that_nobody_closes_does_not_keep_python_from_ending(tmp_path: Path) -> None:
    script_that_forgets = SCRIPT.replace("for task, result in ", "running = ").replace(
        "endless):\n        print(result)", "endless)\n    next(running)"
    )
    script_that_forgets = script_that_forgets.replace('tasks("a", "b"', 'tasks("quick", "b"')
    assert "next(running)" in script_that_forgets
    with started(script_that_forgets, tmp_path) as script:
        assert script.communicate(timeout=cases.PATIENCE) == ("", "")
    assert script.returncode == 0
    assert not any(cases.alive(pid) for pid in cases.pids(tmp_path))


@pytest.mark.parametrize("workers", [0, -1, 1.5, "two"])
def test_a_number_of_workers_that_means_nothing_is_refused(workers: int) -> None:
    for executor in ("processes", "ray"):
        with pytest.raises(OptionError, match=r"Expected a whole number from 1, but got workers="):
            make_executor(executor, workers=workers)


def test_executors_are_found_by_name_and_take_only_their_own_options() -> None:
    assert isinstance(make_executor("serial"), SerialExecutor)
    assert isinstance(make_executor("processes", workers=3), ProcessExecutor)
    assert isinstance(make_executor("ray", address="auto", grows=True), RayExecutor)
    with pytest.raises(UnknownNameError, match=r"Try .*'processes'"):
        make_executor("process")
    with pytest.raises(UnknownNameError, match=r"Try .*'serial'"):
        make_executor("seriall")
    with pytest.raises(UnknownNameError, match=r"'here'.*processes, ray, serial|processes, ray, serial.*'here'"):
        make_executor("here")
    with pytest.raises(OptionError, match=r"Expected no options for the executor 'serial', but got workers=2\."):
        make_executor("serial", workers=2)
    with pytest.raises(OptionError, match=r"Expected workers for the executor 'processes', but got address='auto'\."):
        make_executor("processes", address="auto")
    with pytest.raises(OptionError, match="Expected either workers or an address, but got workers=2 and the address"):
        make_executor("ray", workers=2, address="auto")


def test_any_object_with_a_key_and_resources_is_a_task() -> None:
    task = SimpleNamespace(key="a", resources={})
    assert [result for _, result in SerialExecutor().run([task], lambda each: each.key)] == ["a"]
