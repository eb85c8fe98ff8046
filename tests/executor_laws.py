"""What every executor keeps to, and what those keep to that have other processes work."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, cast

import executor_cases as cases
import pytest
import torch
from executor_cases import Task, tasks, wait_until

from saltflat.studies.executors import Executor, ExecutorError, Failure, SerialExecutor, Session

Law: TypeAlias = Callable[[Executor, Path], None]


class Kept(Executor):
    """A session that one law after another uses: it takes seconds to start workers."""

    name = "kept"

    def __init__(self, session: Session) -> None:
        self._session = session

    def open_session(self) -> Session:
        return cast(Session, nullcontext(self._session))


def results(executor: Executor, given: list[Task], work: Callable[[Task], Any]) -> dict[str, Any]:
    found = list(executor.run(given, work))
    assert sorted(task.key for task, _ in found) == sorted(task.key for task in given), "each once"
    assert all(any(task is each for each in given) for task, _ in found), "the very tasks that were given"
    return {task.key: result for task, result in found}


def results_are_those_of_the_work(executor: Executor, folder: Path) -> None:
    given = tasks(*range(7))
    torch.testing.assert_close(
        results(executor, given, cases.network), {each.key: cases.network(each) for each in given}, rtol=0, atol=0
    )


def errors_are_the_same_failures_everywhere_and_stop_nothing(executor: Executor, folder: Path) -> None:
    given = tasks(5, 0, "x", 2)
    found = results(executor, given, cases.raising)
    assert found == results(SerialExecutor(), given, cases.raising)
    assert (found["5"], found["2"]) == (2, 5)
    assert found["0"].error == "ZeroDivisionError: integer division or modulo by zero"
    assert found["x"].error == "ValueError: invalid literal for int() with base 10: 'x'"
    for key in ("0", "x"):
        assert "return 10 // int(task.key)" in found[key].traceback
        assert "studies/executors" not in found[key].traceback, "no frames of ours"


def an_error_that_has_no_text_and_cannot_be_sent_is_told_by_its_name(executor: Executor, folder: Path) -> None:
    found = results(executor, tasks("a"), cases.strange)["a"]
    assert found.error == "StrangeError: no message"
    assert "raise StrangeError(3, task.key)" in found.traceback


def the_first_result_is_out_before_the_last_task_is_done(executor: Executor, folder: Path) -> None:
    found = []
    for task, result in executor.run(tasks("first", "last", folder=folder), cases.patient):
        (folder / "seen").touch()
        found.append((task.key, result))
    assert found == [("first", "first"), ("last", "last")]


def tasks_without_end_are_taken_as_they_are_needed(executor: Executor, folder: Path) -> None:
    taken = count()

    def forever() -> Iterator[Task]:
        for i in taken:
            yield Task(str(i))

    running = executor.run(forever(), cases.length)
    got = {next(running)[0].key for _ in range(3)}
    running.close()  # type: ignore[attr-defined]
    assert len(got) == 3
    assert next(taken) <= 3 + 2 * 2 + 8, "no more ahead than keeps two workers busy"


def no_tasks_are_no_results(executor: Executor, folder: Path) -> None:
    assert list(executor.run([], cases.upper)) == []


def results_make_new_tasks(executor: Executor, folder: Path) -> None:
    seen: dict[str, object] = {}
    with executor.open_session() as session:
        assert list(session.iter_results()) == []
        for task in tasks("a", "bc", "def"):
            session.submit(task, cases.upper)
        for task, result in session.iter_results():
            seen[task.key] = result
            if isinstance(result, str):
                session.submit(Task(result), cases.length, soon=True)
        session.submit(Task("late"), cases.length)
        seen.update((task.key, result) for task, result in session.iter_results())
    assert seen == {"a": "A", "A": 1, "bc": "BC", "BC": 2, "def": "DEF", "DEF": 3, "late": 4}


def a_closed_session_takes_no_tasks(executor: Executor, folder: Path) -> None:
    with executor.open_session() as session:
        pass
    with pytest.raises(ExecutorError, match="'later' after the session was closed"):
        session.submit(Task("later"), cases.length)


def hundreds_of_tensors_come_back(executor: Executor, folder: Path) -> None:
    given = tasks(300, 301, 302)
    found = results(executor, given, cases.many_tensors)
    torch.testing.assert_close(found, {each.key: cases.many_tensors(each) for each in given})


def work_is_found_in_the_folders_of_this_process(executor: Executor, folder: Path) -> None:
    (folder / "my_own_training.py").write_text("def train(task):\n    return task.key * 2\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        from my_own_training import train  # type: ignore[import-not-found]

        assert results(executor, tasks("ab"), train) == {"ab": "abab"}
    finally:
        sys.path.remove(str(folder))
        del sys.modules["my_own_training"]


def a_worker_that_is_killed_changes_no_result(executor: Executor, folder: Path) -> None:
    def kill() -> None:
        wait_until(lambda: bool(cases.pids(folder)), "a worker said who it is")
        (pid,) = cases.pids(folder)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    given = tasks(*range(7), folder=folder)
    found = results(executor, given, cases.killed_once)
    killer.join()
    assert len(cases.pids(folder)) == 1
    torch.testing.assert_close(found, {each.key: cases.network(each) for each in given}, rtol=0, atol=0)


def a_task_that_always_ends_its_worker_fails_alone_after_three_tries(executor: Executor, folder: Path) -> None:
    found = results(executor, tasks("a", "bad", "b", "c", folder=folder), cases.killing)
    failure = found.pop("bad")
    assert found == {"a": "a", "b": "b", "c": "c"}
    assert isinstance(failure, Failure)
    assert failure.error.startswith("WorkerDied: Expected a worker process that lives")
    assert "\n" not in failure.error
    assert cases.marks(folder / "tries") == 3


def a_task_whose_workers_died_twice_is_tried_alone_and_may_be_done_then(executor: Executor, folder: Path) -> None:
    found = results(executor, tasks("a", "bad", *"bcdefgh", folder=folder), cases.killing_in_company)
    assert found.pop("bad") == "", "nothing ran beside it"
    assert found == {key: key for key in "abcdefgh"}
    assert cases.marks(folder / "tries") == 3


def a_task_that_takes_too_long_is_stopped_and_the_others_go_on(executor: Executor, folder: Path) -> None:
    given = [Task(key, folder) for key in ("slow", "quick")]
    found: dict[str, Any] = {task.key: result for task, result in executor.run(given, cases.endless, timeout=1.0)}
    assert found["quick"] == "quick"
    assert found["slow"].error.startswith("TimedOut: Expected a result within 1 s, but got none")
    assert len(cases.pids(folder)) == 1, "tried once"
    wait_until(lambda: not any(map(cases.alive, cases.pids(folder))), "its worker ended")


def a_task_that_waits_for_a_worker_loses_no_time(executor: Executor, folder: Path) -> None:
    given = tasks(*"abcdef")
    found = {task.key: result for task, result in executor.run(given, cases.short, timeout=1.4)}
    assert found == {key: key for key in "abcdef"}


def a_consumer_that_stops_ends_the_workers(executor: Executor, folder: Path) -> None:
    with executor.open_session() as session:
        for task in tasks("quick", "slow", folder=folder):
            session.submit(task, cases.endless)
        assert next(iter(session.iter_results()))[1] == "quick"
        wait_until(lambda: bool(cases.pids(folder)), "the slow task ran")
        assert all(cases.alive(pid) for pid in cases.pids(folder))
    wait_until(lambda: not any(cases.alive(pid) for pid in cases.pids(folder)), "the workers ended")


def leaving_python_fails_one_task_and_ends_no_worker(executor: Executor, folder: Path) -> None:
    found = results(executor, tasks("a", "bad", "b"), cases.leaving)
    assert found.pop("bad").error == "SystemExit: 3"
    assert found == {"a": "a", "b": "b"}


def what_cannot_be_sent_is_a_failure_that_says_what_to_do(executor: Executor, folder: Path) -> None:
    found = results(executor, tasks("a", "bad"), cases.locked)
    assert found["a"] == "a"
    assert "result that cannot be sent to another process: TypeError: cannot pickle" in found["bad"].error
    work = partial(_with, threading.Lock())
    assert (
        'Try putting it at the top of a module, named as "package.module:function"'
        in results(executor, tasks("a"), work)["a"].error
    )


def _with(lock: object, task: Task) -> str:
    return task.key


def one_work_is_packed_once_and_unpacked_once_per_worker(executor: Executor, folder: Path) -> None:
    found = results(executor, tasks(*range(12)), cases.Heavy(folder))
    assert found == {str(i): str(i) for i in range(12)}
    assert cases.marks(folder / "packed") == 1
    assert 1 <= cases.marks(folder / "unpacked") <= 2


def many_works_are_not_taken_for_each_other(executor: Executor, folder: Path) -> None:
    """Also where a work comes back after the worker saw so many others that it forgot it."""
    first, *others = [partial(_plus, i) for i in range(6)]
    expected = {str(100 * i): 100 * i for i in range(12)}
    found: dict[str, int] = {}
    with executor.open_session() as session:
        for key in expected:
            session.submit(Task(key), first)
        for task, result in session.iter_results():
            if not found:
                for i in range(30):
                    expected[str(100 * i + 50)] = 100 * i + 50 + 1 + i // 6
                    session.submit(Task(str(100 * i + 50)), others[i // 6], soon=True)
            found[task.key] = result
    assert found == expected


def _plus(number: int, task: Task) -> int:
    return number + int(task.key)


# Of what comes out. They may share a session.
LAWS_OF_RESULTS: list[Law] = [
    results_are_those_of_the_work,
    errors_are_the_same_failures_everywhere_and_stop_nothing,
    an_error_that_has_no_text_and_cannot_be_sent_is_told_by_its_name,
    the_first_result_is_out_before_the_last_task_is_done,
    no_tasks_are_no_results,
    results_make_new_tasks,
    hundreds_of_tensors_come_back,
]
# Of how a session begins and ends. Each has its own.
LAWS_OF_SESSIONS: list[Law] = [
    tasks_without_end_are_taken_as_they_are_needed,
    work_is_found_in_the_folders_of_this_process,
    a_closed_session_takes_no_tasks,
]
# The same of executors that have other processes work.
LAWS_OF_RESULTS_ELSEWHERE: list[Law] = [
    a_worker_that_is_killed_changes_no_result,
    a_task_that_always_ends_its_worker_fails_alone_after_three_tries,
    a_task_whose_workers_died_twice_is_tried_alone_and_may_be_done_then,
    a_task_that_takes_too_long_is_stopped_and_the_others_go_on,
    a_task_that_waits_for_a_worker_loses_no_time,
    leaving_python_fails_one_task_and_ends_no_worker,
    what_cannot_be_sent_is_a_failure_that_says_what_to_do,
    one_work_is_packed_once_and_unpacked_once_per_worker,
    many_works_are_not_taken_for_each_other,
]
LAWS_OF_SESSIONS_ELSEWHERE: list[Law] = [
    a_consumer_that_stops_ends_the_workers,
]
