"""Tasks on a Ray cluster."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from saltflat.errors import OptionError, format_error_line
from saltflat.studies.executors import ray_driver
from saltflat.studies.executors.executor import (
    TRIES,
    Executor,
    ExecutorError,
    Failure,
    Session,
    Task,
    make_closed_session_error,
    make_loss_error,
    make_timeout_failure,
)
from saltflat.studies.executors.guard import ProcessGuard
from saltflat.studies.executors.pickling import KEPT, WorkPacker, make_import_failure, make_send_failure, unpack_result
from saltflat.studies.executors.processes import Job, JobQueue, count_cores

START = 180.0  # seconds that Ray may take to start or to connect; its own limits are shorter, but do not cover all
STOP = 10.0  # and that it may take to stop
ENDED = "Ray ended the process that was connected to it, as it does when the node of that process dies"
DISCONNECTED = (EOFError, OSError, pickle.UnpicklingError)  # of a pipe whose other end is gone


class RayExecutor(Executor):
    """On a Ray cluster: each task is a Ray task with its own resources, results come back as they finish.

    A task whose worker process dies is tried three times in all, the last time with no other task of the session beside
    it. A task whose machine dies, or whose result is lost with one, is tried on the machines that are left; that is no
    failure of the task, and where it happens three times with one task, or no machine is left, the session ends in an
    ExecutorError. An error of the task itself is a Failure at once.

    Another process is connected to Ray in place of this one, which is so not ended by Ray when its node dies. The
    modules of this process are found by workers on the same machine. On others, saltflat and what you wrote must be
    installed, or be sent with ``runtime_env={"working_dir": "folder/of/your/code"}``.

    Args:
        address: of a running cluster, ``"10.0.0.1:6379"`` or ``"auto"``. Without it: the cluster that this process is
            connected to, if it is; else what ``RAY_ADDRESS`` says; else a cluster is started on this machine and
            stopped at the end, or when this process is killed.
        workers: cores of the cluster that is started here; all if None.
        grows: the cluster adds machines on demand. Then a task that needs more than there is waits; else it fails.
        runtime_env: what Ray sets up for the workers, as ``ray.init`` takes it.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        grows: bool = False,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            raise OptionError(
                f"Expected a whole number from 1, but got workers={workers!r}. Try leaving it out for all cores."
            )
        if workers is not None and address is not None:
            raise OptionError(
                f"Expected one of them, but got workers={workers} and the address {address!r}. A running cluster has "
                "the cores it has. Try leaving workers out."
            )
        self.address, self.workers, self.grows, self.runtime_env = address, workers, grows, runtime_env

    def open_session(self) -> Session:
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
            "keep": KEPT,
        }
        return _RaySession(ray.cloudpickle.dumps, setup)


class _DriverProcess:
    """The process that is connected to Ray; see :mod:`saltflat.studies.executors.ray_driver`."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.address: str | None = setup["address"]
        self._guard = ProcessGuard()
        # -P: our own folder is not searched for modules, or `import ray` would find this file. In a session of its own
        # with all that Ray starts: Ctrl-C in a terminal does not reach them, and a guard finds them all.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(ray_driver.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        late, began = threading.Timer(START, self._process.kill), time.monotonic()
        late.daemon = True
        late.start()
        try:
            self.send(setup)
            word, said = self.receive()
            if word == "refused":
                raise _make_connection_error(self.address, said)
            self.cpus: int = said
        except DISCONNECTED as error:
            self.close(0.0)
            took = time.monotonic() - began
            said = f"none within {START:g} seconds" if took >= START else "no answer: Ray ended the process that asked"
            raise _make_connection_error(self.address, said) from error
        except BaseException:
            self.close(0.0)
            raise
        finally:
            late.cancel()

    def send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        pickle.dump(command, self._process.stdin)
        self._process.stdin.flush()

    def receive(self) -> tuple[Any, ...]:
        """Wait for the next answer."""
        assert self._process.stdout is not None
        answer: tuple[Any, ...] = pickle.load(self._process.stdout)
        return answer

    def close(self, patience: float = STOP) -> None:
        """Disconnect. A cluster that was started for this session ends, also where Ray cannot end it any more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._guard.close()  # kills what is left
        self._process.wait()
        self._process.stdout.close()


class _RaySession(Session):
    def __init__(self, dumps: Callable[[Any], bytes], setup: Mapping[str, Any]) -> None:
        self._dumps, self._outbox, self._jobs = dumps, WorkPacker(dumps), JobQueue()
        self._running: dict[int, Job] = {}
        self._numbers = count()
        self._knows: deque[str] = deque(maxlen=KEPT)  # the same works that the driver keeps
        self._driver = _DriverProcess(setup)
        self._open = True

    @property
    def at_once(self) -> int:
        # The next tasks are there when a core is free, and a cluster that grows sees that there is more to do.
        return 8 + 2 * self._driver.cpus

    def __exit__(self, *error: object) -> None:
        if self._open:
            self._open = False
            self._jobs.clear()
            self._running.clear()
            self._driver.close()

    def submit(
        self, task: Task, work: Callable[[Any], Any], *, soon: bool = False, timeout: float | None = None
    ) -> None:
        if not self._open:
            raise make_closed_session_error(task.key)
        try:
            job = Job(task, self._outbox.pack(work), self._dumps(task), timeout)
        except Exception as error:
            self._jobs.done.append((task, make_send_failure(error)))
            return
        self._jobs.add(job, soon)
        self._assign_jobs()

    def iter_results(self) -> Iterator[tuple[Any, Any]]:
        while True:
            self._assign_jobs()
            if self._jobs.done:
                yield self._jobs.done.popleft()
            elif self._running:
                self._wait_for_answer()
            else:
                return

    def _assign_jobs(self) -> None:
        while len(self._running) < self.at_once and self._jobs.count_ready(len(self._running)):
            job, number = self._jobs.pop_next(), next(self._numbers)
            self._running[number] = job
            content = None if job.parcel.number in self._knows else job.parcel.content
            if content is not None:
                self._knows.append(job.parcel.number)
            command = {
                "job": number,
                "number": job.parcel.number,
                "work": content,
                "task": job.content,
                "resources": dict(job.task.resources),
                "timeout": job.timeout,
            }
            try:
                self._driver.send(command)
            except DISCONNECTED as error:
                raise self._make_loss_error(ENDED) from error

    def _wait_for_answer(self) -> None:
        """Wait until a task is done or given up."""
        try:
            word, *said = self._driver.receive()
        except DISCONNECTED as error:
            raise self._make_loss_error(ENDED) from error
        if word == "gone":
            raise self._make_loss_error(*said)
        if word == "cpus":
            (self._driver.cpus,) = said
            return
        job = self._running.pop(said[0])
        match word, *said[1:]:
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
                if job.losses >= TRIES:
                    raise self._make_loss_error(error)
                self._knows.clear()  # the work may have been lost with it
                self._jobs.retry(job)

    def _make_loss_error(self, why: str) -> ExecutorError:
        address = self._driver.address
        return make_loss_error("a local Ray cluster" if address is None else f"the Ray cluster at {address!r}", why)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ExecutorError(
            "Expected it installed, but got the executor 'ray', and Ray cannot be imported: "
            f"{format_error_line(error)}. Try pip install ray, or use executor='processes'."
        ) from error
    return ray


def _get_cluster_address(ray: Any) -> str:
    """The address of the cluster that this process is connected to."""
    if ray.util.client.ray.is_connected():
        raise ExecutorError(
            "Expected the address of a Ray cluster, but got a process connected to one through ray:// that cannot "
            "say where it is. Try Ray(address='ray://...') or RAY_ADDRESS, with the same address."
        )
    address: str = ray.get_runtime_context().gcs_address
    return address


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10.0).close()
        except OSError as error:
            raise _make_connection_error(address, format_error_line(error)) from error


def _make_connection_error(address: str | None, said: str) -> ExecutorError:
    if address is None:
        return ExecutorError(
            f"Expected a local Ray cluster to start, but got {said}. Try again when the machine is less busy, with "
            "fewer workers, or with executor='processes', which needs no cluster."
        )
    return ExecutorError(
        f"Expected an answer from the Ray cluster at {address!r}, but got {said}. Try `ray status` there, or leave the "
        "address out (and RAY_ADDRESS unset) for a cluster on this machine."
    )
