"""Run tasks on a Ray cluster."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from types import ModuleType
from typing import Any

from saltflat.errors import OptionError, format_error_line
from saltflat.studies.executors import ray_driver
from saltflat.studies.executors.executor import (
    MAX_TRIES,
    Executor,
    ExecutorError,
    Failure,
    Session,
    check_workers,
    make_loss_error,
    make_timeout_failure,
)
from saltflat.studies.executors.guard import ProcessGuard
from saltflat.studies.executors.pickling import MAX_WORKS, Dumps, SentWorks, make_import_failure, unpack_result
from saltflat.studies.executors.processes import count_cores
from saltflat.studies.executors.session import Job, JobSession

START_TIMEOUT = 180.0  # seconds to start Ray or connect to it; Ray's own limits are shorter, but incomplete
STOP_TIMEOUT = 10.0  # seconds to stop Ray
ENDED_BY_RAY = "Ray ended the process that was connected to it, as it does when the node of that process dies"
DISCONNECTED = (EOFError, OSError, pickle.UnpicklingError)  # raised by a pipe whose other end is closed


class RayExecutor(Executor):
    """Run each task as a Ray task with its own resources, and return results as they finish.

    A task whose worker process dies is tried three times in all, the last time while no other task of the session
    runs. A task whose machine dies, or whose result is lost with one, is retried on the remaining machines and does
    not fail; if this happens three times with one task, or no machine is left, the session ends in an ExecutorError.
    An error raised by the task itself becomes a Failure at once.

    A helper process connects to Ray, so that Ray does not end this one when its node dies. Workers on the same machine
    find the modules of this process. On other machines, saltflat and your code must be installed, or be sent with
    ``runtime_env={"working_dir": "folder/of/your/code"}``.

    Args:
        address: the address of a running cluster, ``"10.0.0.1:6379"`` or ``"auto"``. Default: the cluster that this
            process is connected to, if any; else ``RAY_ADDRESS``, if set; else a cluster is started on this machine
            and stopped at the end, or when this process is killed.
        workers: the cores of a cluster that is started; all if None.
        grows: the cluster adds machines on demand. Then a task that needs more than there is waits; else it fails.
        runtime_env: the environment that Ray prepares for the workers, as in ``ray.init``.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        grows: bool = False,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        check_workers(workers, default="all cores")
        if workers is not None and address is not None:
            raise OptionError(
                f"Expected either workers or an address, but got workers={workers} and the address {address!r}, a "
                "running cluster whose number of cores is fixed. Try leaving workers out."
            )
        self.address, self.workers, self.grows, self.runtime_env = address, workers, grows, runtime_env

    def open_session(self) -> Session:
        """Connect to the cluster, or start one, and return a session on it."""
        ray = _import_ray()
        address, runtime_env = self.address, self.runtime_env
        if address is None and ray.is_initialized():
            address = _get_cluster_address(ray)
            runtime_env = runtime_env or ray.get_runtime_context().runtime_env
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None:
            _check_reachable(address)
        setup = {
            "address": address,
            "cpus": self.workers or count_cores(),
            "runtime_env": dict(runtime_env or {}),
            "grows": self.grows,
            "paths": list(dict.fromkeys(os.path.abspath(path) for path in sys.path)),
            "max_works": MAX_WORKS,
        }
        return _RaySession(ray.cloudpickle.dumps, setup)


class _DriverProcess:
    """The helper process that connects to Ray; see :mod:`saltflat.studies.executors.ray_driver`."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.address: str | None = setup["address"]
        self._guard = ProcessGuard()
        # -P keeps our own folder out of the module search, or `import ray` would find this file. The new session holds
        # all that Ray starts: Ctrl-C in a terminal does not reach it, and a guard finds all of its processes.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(ray_driver.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        late, began = threading.Timer(START_TIMEOUT, self._process.kill), time.monotonic()
        late.daemon = True
        late.start()
        try:
            self.send(setup)
            kind, detail = self.receive()
            if kind == "refused":
                raise _make_connection_error(self.address, detail)
            self.cpus: int = detail
        except DISCONNECTED as error:
            self.close(0.0)
            took = time.monotonic() - began
            problem = "no answer: Ray ended the process that connected"
            if took >= START_TIMEOUT:
                problem = f"none within {START_TIMEOUT:g} seconds"
            raise _make_connection_error(self.address, problem) from error
        except BaseException:
            self.close(0.0)
            raise
        finally:
            late.cancel()

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command to the driver."""
        assert self._process.stdin is not None
        pickle.dump(command, self._process.stdin)
        self._process.stdin.flush()

    def receive(self) -> tuple[Any, ...]:
        """Wait for the next answer, and return it."""
        assert self._process.stdout is not None
        answer: tuple[Any, ...] = pickle.load(self._process.stdout)
        return answer

    def close(self, timeout: float = STOP_TIMEOUT) -> None:
        """Disconnect, and stop a cluster that was started for this session even if Ray can no longer stop it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self._guard.close()  # kills what is left
        self._process.wait()
        self._process.stdout.close()


class _RaySession(JobSession):
    def __init__(self, dumps: Dumps, setup: Mapping[str, Any]) -> None:
        super().__init__(dumps)
        self._running: dict[int, Job] = {}
        self._numbers = count()
        self._works = SentWorks()
        self._driver = _DriverProcess(setup)

    @property
    def at_once(self) -> int:
        # The next tasks are ready when a core becomes free, and a growing cluster sees that there is more to do.
        return 8 + 2 * self._driver.cpus

    @property
    def _num_running(self) -> int:
        return len(self._running)

    def _assign_jobs(self) -> None:
        while len(self._running) < self.at_once and self._jobs.count_ready(len(self._running)):
            job, number = self._jobs.pop_next(), next(self._numbers)
            self._running[number] = job
            command = {
                "job": number,
                "work_id": job.work.work_id,
                "work": self._works.get_unsent_content(job.work),
                "task": job.content,
                "resources": dict(job.task.resources),
                "timeout": job.timeout,
            }
            try:
                self._driver.send(command)
            except DISCONNECTED as error:
                raise self._make_loss_error(ENDED_BY_RAY) from error

    def _wait(self) -> None:
        """Wait until a task ends or the cluster changes."""
        try:
            kind, *details = self._driver.receive()
        except DISCONNECTED as error:
            raise self._make_loss_error(ENDED_BY_RAY) from error
        if kind == "gone":
            raise self._make_loss_error(*details)
        if kind == "cpus":
            (self._driver.cpus,) = details
            return
        job = self._running.pop(details[0])
        match kind, *details[1:]:
            case "result", content:
                self._jobs.finish(job, unpack_result(content))
            case "failed", error:
                self._jobs.finish(job, Failure(error))
            case "not found", error, traceback:
                self._jobs.finish(job, make_import_failure(error, traceback))
            case ("timed out",):
                assert job.timeout is not None
                self._jobs.finish(job, make_timeout_failure(job.timeout))
            case "died", error:
                self._jobs.record_death(job, f"ended ({error})")
            case "lost", error:
                job.losses += 1
                if job.losses >= MAX_TRIES:
                    raise self._make_loss_error(error)
                self._works.clear()  # the work may have been lost with it
                self._jobs.retry(job)

    def _stop_all(self) -> None:
        self._running.clear()
        self._driver.close()

    def _make_loss_error(self, reason: str) -> ExecutorError:
        address = self._driver.address
        return make_loss_error("a local Ray cluster" if address is None else f"the Ray cluster at {address!r}", reason)


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise ExecutorError(
            "Expected Ray for the executor 'ray', but got an error when importing it: "
            f"{format_error_line(error)}. Try pip install ray, or use executor='processes'."
        ) from error
    module: ModuleType = ray
    return module


def _get_cluster_address(ray: ModuleType) -> str:
    """Return the address of the cluster that this process is connected to."""
    if ray.util.client.ray.is_connected():
        raise ExecutorError(
            "Expected the address of a Ray cluster, but got a process connected to one through ray://, whose "
            "address Ray does not tell. Try RayExecutor(address='ray://...') or RAY_ADDRESS, with the same address."
        )
    address: str = ray.get_runtime_context().gcs_address
    return address


def _check_reachable(address: str) -> None:
    """Check that the address accepts connections; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10.0).close()
        except OSError as error:
            raise _make_connection_error(address, format_error_line(error)) from error


def _make_connection_error(address: str | None, problem: str) -> ExecutorError:
    if address is None:
        return ExecutorError(
            f"Expected a local Ray cluster to start, but got {problem}. Try again when the machine is less busy, with "
            "fewer workers, or with executor='processes', which needs no cluster."
        )
    return ExecutorError(
        f"Expected an answer from the Ray cluster at {address!r}, but got {problem}. Try `ray status` there, or leave "
        "the address out (and RAY_ADDRESS unset) for a cluster on this machine."
    )
