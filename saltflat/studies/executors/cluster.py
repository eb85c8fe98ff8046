"""A Ray cluster: reached or started, asked what it has, given tasks, left as it was found."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from saltflat.errors import first_line
from saltflat.studies.executors.failure import ExecutorError

NAMES = {"cpus": "CPU", "gpus": "GPU"}  # ours and Ray's


@dataclass(frozen=True)
class Cluster:
    """A connection to Ray.

    Attributes:
        ray: the library.
        ours: whether it was this executor that connected, and so disconnects.
    """

    ray: ModuleType
    ours: bool

    def cpus(self) -> int:
        return int(self.ray.cluster_resources().get("CPU", 1))

    def lacking(self, resources: Mapping[str, float]) -> str:
        """Why no machine of the cluster can ever run a task with these resources; empty where one can."""
        needs = {NAMES.get(name, name): amount for name, amount in needed(resources).items()}
        machines = [each["Resources"] for each in self.ray.nodes() if each["Alive"]]
        if any(all(has.get(name, 0) >= amount for name, amount in needs.items()) for has in machines):
            return ""
        most = {name: max((has.get(name, 0) for has in machines), default=0) for name in needs}
        return (
            f"Got a task that needs {needs}, and no machine of the Ray cluster has that: the most of each is {most}. "
            "Want a task that fits on one machine. Do: ask for less, add a machine, or set grows=True where the "
            "cluster adds machines by itself."
        )

    @cached_property
    def _remote(self) -> Any:
        # Defined in here, and so sent as code: a worker can run it before it knows where saltflat is.
        def answered(paths: list[str], threads: int, number: str, work: bytes, task: bytes) -> bytes:
            import sys

            sys.path.extend(path for path in paths if path not in sys.path)
            from saltflat.studies.executors import ray_worker

            return ray_worker.answered(threads, number, work, task)

        return self.ray.remote(answered)

    def start(self, number: str, work: Any, task: bytes, resources: Mapping[str, float], retries: int) -> Any:
        """A Ray task; what it returns are the bytes of its result."""
        needs = needed(resources)
        cpus, gpus = needs.pop("cpus"), needs.pop("gpus")
        # Retried where its worker died. Errors of the work come back as results and are not.
        remote = self._remote.options(
            num_cpus=cpus, num_gpus=gpus, resources=needs or None, max_retries=retries, retry_exceptions=False
        )
        return remote.remote(_paths(), max(1, int(cpus)), number, work, task)

    def leave(self, running: Iterable[Any]) -> None:
        """Stop these tasks, and disconnect if it was us who connected; a cluster that was started here ends with it."""
        for one in running:
            self.ray.cancel(one, force=True)
        if self.ours:
            with _handlers_restored():
                self.ray.shutdown()


def needed(resources: Mapping[str, float]) -> dict[str, float]:
    """What a task needs where it does not say all.

    Example:
        >>> needed({"gpus": 0.5})
        {'cpus': 1, 'gpus': 0.5}
    """
    return {"cpus": 1, "gpus": 0, **resources}


def connected(address: str | None, cpus: int, runtime_env: Mapping[str, Any] | None) -> Cluster:
    """To the Ray of this process if it has one, else to that of the address or ``RAY_ADDRESS``, else to a new one."""
    try:
        import ray
    except ImportError as error:
        raise ExecutorError(
            f"Got the executor 'ray', and Ray cannot be imported: {first_line(error)}. Want it installed. "
            "Do: pip install 'saltflat[ray]', or use executor='processes'."
        ) from error
    if ray.is_initialized():
        return Cluster(ray, ours=False)
    where = address or os.environ.get("RAY_ADDRESS")
    if where:
        _check_reachable(where)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": dict(runtime_env or {})}
    try:
        with _handlers_restored(), _no_usage_report():
            if where:
                ray.init(address=where, **quiet)
            else:
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        ray.shutdown()
        raise _no_answer(f"the Ray cluster at {where!r}" if where else "a local Ray cluster", error) from error
    return Cluster(ray, ours=True)


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes and then ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10.0).close()
        except OSError as error:
            raise _no_answer(f"the Ray cluster at {address!r}", error) from error


def _no_answer(cluster: str, error: Exception) -> ExecutorError:
    return ExecutorError(
        f"Got {first_line(error)} from {cluster}. Want one that answers. Do: see `ray status` there, or leave the "
        "address out (and RAY_ADDRESS unset) for a cluster on this machine."
    )


def _paths() -> list[str]:
    return list(dict.fromkeys(os.path.abspath(path) for path in sys.path))


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Ray sets what SIGTERM does. What it did before is the business of whoever runs this process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _no_usage_report() -> Iterator[None]:
    """A cluster that is started here tells nobody of it, unless the user's environment says so."""
    told = "RAY_USAGE_STATS_ENABLED" in os.environ
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        yield
    finally:
        if not told:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
