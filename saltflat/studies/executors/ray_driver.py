"""The program that connects to Ray on behalf of the study.

When the Ray node of a connected process dies, Ray ends that process without an exception or a message. A study must
survive this, so it starts this program and talks to it over pipes. The program imports nothing from saltflat, and so
starts without torch.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any, BinaryIO
from uuid import uuid4

RAY_NAMES = {"cpus": "CPU", "gpus": "GPU"}  # of resources, by our names


class RayDriver:
    """Start tasks, and report how they end.

    Args:
        ray: the module, connected to a cluster.
        answer: called with a tuple whose first entry names the event:

            * ``("result", job, bytes)``
            * ``("failed", job, error)``: no machine can run the task
            * ``("not found", job, error, traceback)``: a worker cannot import saltflat
            * ``("timed out", job)``
            * ``("died", job, error)``: its worker process died, but not its machine
            * ``("lost", job, error)``: a machine or an object was lost; other machines may be left
            * ``("gone", error)``: no machine is left to run tasks
            * ``("cpus", number)``: the number of cores changed
        paths: folders in which workers look for modules.
        grows: whether the cluster adds machines on demand.
    """

    def __init__(
        self, ray: ModuleType, answer: Callable[[tuple[Any, ...]], None], paths: Sequence[str], grows: bool
    ) -> None:
        self.ray, self.answer, self.paths, self.grows = ray, answer, paths, grows
        self.remote = ray.remote(_run_remotely)
        self.works: dict[str, Any] = {}  # stored in the cluster, by id
        self.seen: list[Mapping[str, float]] = []  # the resources of machines, also of lost ones
        self.cpus = 0

    def report_cpus(self) -> None:
        """Report the number of cores if it changed."""
        cpus = int(self.ray.cluster_resources().get("CPU", 1))
        if cpus != self.cpus:
            self.cpus = cpus
            self.answer(("cpus", cpus))

    def store_work(self, work_id: str, content: bytes, max_works: int) -> None:
        """Store work in the cluster, and drop the oldest if there are more than ``max_works``."""
        self.works.pop(work_id, None)
        while len(self.works) >= max_works:
            del self.works[next(iter(self.works))]
        self.works[work_id] = self.ray.put(content)

    def start_task(
        self,
        job: int,
        work_id: str,
        task: bytes,
        resources: Mapping[str, float],
        timeout: float | None,
        on_done: Callable[[tuple[int, str, Future[bytes]]], None],
    ) -> None:
        """Start a task, and call ``on_done`` with its job, mark and future once it has ended."""
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
                f"Expected numbers that Ray accepts, but got the resources {dict(resources)}: "
                f"{_format_first_line(error)}. Try cpus and gpus from 0, whole numbers above 1."
            )
            self.answer(("failed", job, text))
            return
        reference = remote.remote(self.paths, max(1, int(cpus)), work_id, self.works[work_id], task, timeout, mark)
        reference.future().add_done_callback(lambda future: on_done((job, mark, future)))

    def _check_resources(self, job: int, needs: Mapping[str, float]) -> bool:
        machines = [each["Resources"] for each in self.ray.nodes() if each["Alive"]]
        self.seen += [each for each in machines if each not in self.seen]
        if _has_resources(machines, needs):
            return True
        requested = {RAY_NAMES.get(name, name): amount for name, amount in needs.items()}
        if _has_resources(self.seen, needs):
            self.answer(("gone", f"no machine is left of those that had {requested}"))
            return False
        most = {name: max((has.get(name, 0) for has in machines), default=0) for name in requested}
        text = (
            f"Expected a task that fits on one machine, but got a task that needs {requested}, and no machine of the "
            f"Ray cluster has that: the most of each is {most}. Try requesting less, or adding a machine; set "
            "grows=True if the cluster adds machines itself."
        )
        self.answer(("failed", job, text))
        return False

    def report_result(self, job: int, mark: str, future: Future[bytes]) -> None:
        """Report how a task ended."""
        errors = self.ray.exceptions
        error: Any = future.exception()
        if isinstance(error, errors.RayTaskError) and isinstance(error.cause, errors.RayError):
            error = error.cause  # the work did not reach the worker
        if error is None:
            self.answer(("result", job, future.result()))
        elif isinstance(error, errors.RayTaskError):  # before the work started: saltflat itself is missing
            self.answer(("not found", job, _format_first_line(error.cause or error), str(error)))
        elif isinstance(error, errors.WorkerCrashedError | errors.OutOfMemoryError):
            late = self._pop_timeout_mark(mark)
            self.answer(("timed out", job) if late else ("died", job, _format_first_line(error)))
        elif isinstance(error, errors.LocalRayletDiedError):
            self.answer(("gone", _format_first_line(error)))
        else:  # none of Ray's other errors is the task's fault
            self.answer(("lost", job, _format_first_line(error)))

    def _pop_timeout_mark(self, mark: str) -> bool:
        """Return whether the worker ended itself at the time limit, as recorded in the cluster's key-value store."""
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

        found = _internal_kv_get(mark) is not None
        if found:
            _internal_kv_del(mark)
        return found


def fill_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Return what a task needs, with defaults for what it leaves out.

    Example:
        >>> fill_resources({"gpus": 0.5})
        {'cpus': 1, 'gpus': 0.5}
    """
    return {"cpus": 1, "gpus": 0, **resources}


def _has_resources(machines: Sequence[Mapping[str, float]], needs: Mapping[str, float]) -> bool:
    return any(
        all(has.get(RAY_NAMES.get(name, name), 0) >= amount for name, amount in needs.items()) for has in machines
    )


def _run_remotely(
    paths: Sequence[str], threads: int, work_id: str, work: bytes, task: bytes, timeout: float | None, mark: str
) -> bytes:
    # Defined in the main program, and so sent as code: a worker can run it before it knows where saltflat is.
    import sys

    sys.path.extend(path for path in paths if path not in sys.path)
    from saltflat.studies.executors import pickling

    return pickling.run_remote_task(threads, work_id, work, task, timeout, mark)


def _format_first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].strip().splitlines()[0].removeprefix("ray.exceptions.")


def _connect_ray(ray: ModuleType, address: str | None, cpus: int, runtime_env: Mapping[str, Any]) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": dict(runtime_env)}
    if address is None:
        # A cluster that is started here reports no usage statistics, unless the user's environment enables them.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    else:
        ray.init(address=address, **quiet)


def _open_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes from and to the study, out of reach of other code that reads and prints in this process."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return commands, answers


def main() -> None:
    """Run the commands of the study until it closes the pipe."""
    commands, answers = _open_pipes()

    def send_answer(answer: tuple[Any, ...]) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    setup = pickle.load(commands)
    sys.path.extend(path for path in setup["paths"] if path not in sys.path)
    try:
        import ray

        _connect_ray(ray, setup["address"], setup["cpus"], setup["runtime_env"])
        driver = RayDriver(ray, send_answer, setup["paths"], setup["grows"])
        driver.report_cpus()
    except Exception as error:  # Ray raises many types, also plain ones
        send_answer(("refused", _format_first_line(error)))
        return
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_commands() -> None:
        try:
            while True:
                events.put(pickle.load(commands))
        except Exception:  # the end, or half a command from a study that was killed
            events.put(None)

    threading.Thread(target=read_commands, daemon=True).start()
    while (event := events.get()) is not None:
        try:
            if isinstance(event, dict):
                if event["work"] is not None:
                    driver.store_work(event["work_id"], event["work"], setup["max_works"])
                driver.start_task(
                    event["job"], event["work_id"], event["task"], event["resources"], event["timeout"], events.put
                )
            else:
                driver.report_result(*event)
                driver.report_cpus()
        except Exception as error:
            send_answer(("gone", _format_first_line(error)))
    ray.shutdown()


if __name__ == "__main__":
    main()
