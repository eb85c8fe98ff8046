"""The program that is connected to Ray in place of the study.

When the Ray node of a connected process dies, Ray ends that process: no exception, no message. A study has to outlive
this, so it starts this program and talks to it over pipes. It imports nothing of saltflat, and so starts without torch.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO
from uuid import uuid4

NAMES = {"cpus": "CPU", "gpus": "GPU"}  # ours and Ray's


class RayDriver:
    """Starts tasks, and tells what becomes of them.

    Args:
        ray: the library, connected.
        answer: called with a tuple, a word first:

            * ``("result", job, bytes)``
            * ``("failed", job, error)``: no machine can run the task
            * ``("not found", job, error, traceback)``: a worker cannot import saltflat
            * ``("timed out", job)``
            * ``("died", job, error)``: a worker process died with it, and its machine did not
            * ``("lost", job, error)``: a machine or an object was lost; others may be left
            * ``("gone", error)``: nothing is left that could run tasks
            * ``("cpus", number)``: the cluster has grown or shrunk
        paths: where workers find modules.
        grows: whether the cluster adds machines on demand.
    """

    def __init__(self, ray: Any, answer: Callable[[tuple[Any, ...]], None], paths: Sequence[str], grows: bool) -> None:
        self.ray, self.answer, self.paths, self.grows = ray, answer, paths, grows
        self.remote = ray.remote(_run_remotely)
        self.works: dict[str, Any] = {}  # that lie in the cluster
        self.seen: list[Mapping[str, float]] = []  # what machines have, or had
        self.cpus = 0

    def report_cpus(self) -> None:
        """Tell how many cores there are, where it is news."""
        cpus = int(self.ray.cluster_resources().get("CPU", 1))
        if cpus != self.cpus:
            self.cpus = cpus
            self.answer(("cpus", cpus))

    def store_work(self, number: str, content: bytes, keep: int) -> None:
        """Lay work into the cluster, in place of the oldest where there are too many."""
        self.works.pop(number, None)
        while len(self.works) >= keep:
            del self.works[next(iter(self.works))]
        self.works[number] = self.ray.put(content)

    def start_task(
        self,
        job: int,
        number: str,
        task: bytes,
        resources: Mapping[str, float],
        timeout: float | None,
        then: Callable[[Any], None],
    ) -> None:
        """Start a task, and call ``then`` with its future once it has ended."""
        needs = fill_resources(resources)
        if not self.grows and not self._check_resources(job, needs):
            return
        mark = f"saltflat-{uuid4().hex}"
        cpus, gpus = needs.pop("cpus"), needs.pop("gpus")
        try:
            # Not retried by Ray, which cannot tell a task that ends its worker from a machine that dies.
            remote = self.remote.options(num_cpus=cpus, num_gpus=gpus, resources=needs or None, max_retries=0)
        except (TypeError, ValueError) as error:
            text = (
                f"Expected numbers that Ray takes, but got the resources {dict(resources)}: "
                f"{_format_first_line(error)}. Try cpus and gpus from 0, whole numbers above 1."
            )
            self.answer(("failed", job, text))
            return
        reference = remote.remote(self.paths, max(1, int(cpus)), number, self.works[number], task, timeout, mark)
        reference.future().add_done_callback(lambda future: then((job, mark, future)))

    def _check_resources(self, job: int, needs: Mapping[str, float]) -> bool:
        machines = [each["Resources"] for each in self.ray.nodes() if each["Alive"]]
        self.seen += [each for each in machines if each not in self.seen]
        if _has_resources(machines, needs):
            return True
        asked = {NAMES.get(name, name): amount for name, amount in needs.items()}
        if _has_resources(self.seen, needs):
            self.answer(("gone", f"no machine is left of those that had {asked}"))
            return False
        most = {name: max((has.get(name, 0) for has in machines), default=0) for name in asked}
        text = (
            f"Expected a task that fits on one machine, but got a task that needs {asked}, and no machine of the Ray "
            f"cluster has that: the most of each is {most}. Try asking for less, add a machine, or setting "
            "grows=True where the cluster adds machines by itself."
        )
        self.answer(("failed", job, text))
        return False

    def report_result(self, job: int, mark: str, future: Any) -> None:
        """Tell how a task ended."""
        errors = self.ray.exceptions
        error = future.exception()
        if isinstance(error, errors.RayTaskError) and isinstance(error.cause, errors.RayError):
            error = error.cause  # the work did not reach the worker
        if error is None:
            self.answer(("result", job, future.result()))
        elif isinstance(error, errors.RayTaskError):  # before the work began: saltflat itself is not there
            self.answer(("not found", job, _format_first_line(error.cause or error), str(error)))
        elif isinstance(error, errors.WorkerCrashedError | errors.OutOfMemoryError):
            late = self._pop_timeout_mark(mark)
            self.answer(("timed out", job) if late else ("died", job, _format_first_line(error)))
        elif isinstance(error, errors.LocalRayletDiedError):
            self.answer(("gone", _format_first_line(error)))
        else:  # of Ray's other errors none is of the task
            self.answer(("lost", job, _format_first_line(error)))

    def _pop_timeout_mark(self, mark: str) -> bool:
        """Whether the worker ended itself at the time limit; it says so in the cluster's own store."""
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

        found = _internal_kv_get(mark) is not None
        if found:
            _internal_kv_del(mark)
        return found


def fill_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """What a task needs where it does not say all.

    Example:
        >>> fill_resources({"gpus": 0.5})
        {'cpus': 1, 'gpus': 0.5}
    """
    return {"cpus": 1, "gpus": 0, **resources}


def _has_resources(machines: Sequence[Mapping[str, float]], needs: Mapping[str, float]) -> bool:
    return any(all(has.get(NAMES.get(name, name), 0) >= amount for name, amount in needs.items()) for has in machines)


def _run_remotely(
    paths: Sequence[str], threads: int, number: str, work: bytes, task: bytes, timeout: float | None, mark: str
) -> bytes:
    # Of the program itself, and so sent as code: a worker can run it before it knows where saltflat is.
    import sys

    sys.path.extend(path for path in paths if path not in sys.path)
    from saltflat.studies.executors import ray_worker

    return ray_worker.run_remote_task(threads, number, work, task, timeout, mark)


def _format_first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].strip().splitlines()[0].removeprefix("ray.exceptions.")


def _connect_ray(ray: Any, address: str | None, cpus: int, runtime_env: Mapping[str, Any]) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": dict(runtime_env)}
    if address is None:
        # A cluster that is started here tells nobody of it, unless the user's environment says so.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    else:
        ray.init(address=address, **quiet)


def _open_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to and from the study, out of reach of what else reads and prints in this process."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return commands, answers


def main() -> None:
    """Do what the study says until it has no more to say."""
    commands, answers = _open_pipes()

    def send_answer(words: tuple[Any, ...]) -> None:
        pickle.dump(words, answers)
        answers.flush()

    setup = pickle.load(commands)
    sys.path.extend(path for path in setup["paths"] if path not in sys.path)
    try:
        import ray

        _connect_ray(ray, setup["address"], setup["cpus"], setup["runtime_env"])
        driver = RayDriver(ray, send_answer, setup["paths"], setup["grows"])
        driver.report_cpus()
    except Exception as error:  # Ray has many kinds, the plainest among them
        send_answer(("refused", _format_first_line(error)))
        return
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_commands() -> None:
        try:
            while True:
                events.put(pickle.load(commands))
        except Exception:  # the end, or half a command of a study that was killed
            events.put(None)

    threading.Thread(target=read_commands, daemon=True).start()
    while (event := events.get()) is not None:
        try:
            if isinstance(event, dict):
                if event["work"] is not None:
                    driver.store_work(event["number"], event["work"], setup["keep"])
                driver.start_task(
                    event["job"], event["number"], event["task"], event["resources"], event["timeout"], events.put
                )
            else:
                driver.report_result(*event)
                driver.report_cpus()
        except Exception as error:
            send_answer(("gone", _format_first_line(error)))
    ray.shutdown()


if __name__ == "__main__":
    main()
