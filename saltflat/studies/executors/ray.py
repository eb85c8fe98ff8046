"""Tasks on a Ray cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from saltflat.errors import OptionError, first_line
from saltflat.studies.executors.cluster import Cluster, connected
from saltflat.studies.executors.executor import Executor, Session, Task
from saltflat.studies.executors.failure import RETRIES, Failure, closed, died
from saltflat.studies.executors.parcels import Outbox, Parcel, not_found, not_sent, unpacked_result
from saltflat.studies.executors.processes import cores


class Ray(Executor):
    """On a Ray cluster: each task is a Ray task with its own resources, results come back as they finish.

    Ray runs a task again whose worker process or machine died, three times in all. An error of the task itself is a
    Failure at once. The modules of this process are found by workers on the same machine. On others, saltflat and what
    you wrote must be installed, or be sent with ``runtime_env={"working_dir": "folder/of/your/code"}``.

    Args:
        address: of a running cluster, ``"10.0.0.1:6379"`` or ``"auto"``. Without it: what ``RAY_ADDRESS`` says; else a
            cluster is started on this machine and stopped at the end. A Ray that is initialised in this process already
            is used as it is, and left running.
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
            raise OptionError(f"Got workers={workers!r}. Want a whole number from 1. Do: leave it out for all cores.")
        if workers is not None and address is not None:
            raise OptionError(
                f"Got workers={workers} and the address {address!r}. Want one of them: a running cluster has the cores "
                "it has. Do: leave workers out."
            )
        self.address, self.workers, self.grows, self.runtime_env = address, workers, grows, runtime_env

    def open(self) -> Session:
        return _Session(connected(self.address, self.workers or cores(), self.runtime_env), self.grows)


class _Session(Session):
    def __init__(self, cluster: Cluster, grows: bool) -> None:
        self._cluster, self._grows = cluster, grows
        self._outbox = Outbox(cluster.ray.cloudpickle.dumps)
        self._sent: deque[tuple[Parcel, Any]] = deque(maxlen=4)  # works that lie in the cluster
        self._waiting: deque[tuple[Task, Parcel, bytes]] = deque()
        self._running: dict[Any, Task] = {}
        self._done: deque[tuple[Task, Any]] = deque()
        self._open = True

    @property
    def at_once(self) -> int:
        # The next tasks are there when a core is free, and a cluster that grows sees that there is more to do.
        return 8 + 2 * self._cluster.cpus()

    def __exit__(self, *error: object) -> None:
        if self._open:
            self._open = False
            self._waiting.clear()
            self._cluster.leave(list(self._running))
            self._running.clear()

    def submit(self, task: Task, work: Callable[[Any], Any], *, soon: bool = False) -> None:
        if not self._open:
            raise closed(task.key)
        try:
            packed = task, self._outbox.parcel(work), self._cluster.ray.cloudpickle.dumps(task)
        except Exception as error:
            self._done.append((task, not_sent(error)))
            return
        (self._waiting.appendleft if soon else self._waiting.append)(packed)
        self._hand_out()

    def finished(self) -> Iterator[tuple[Any, Any]]:
        while True:
            self._hand_out()
            if self._done:
                yield self._done.popleft()
            elif self._running:
                self._listen()
            else:
                return

    def _hand_out(self) -> None:
        while self._waiting and len(self._running) < self.at_once:
            task, parcel, content = self._waiting.popleft()
            lacking = "" if self._grows else self._cluster.lacking(task.resources)
            if lacking:
                self._done.append((task, Failure(lacking)))
                continue
            try:
                running = self._cluster.start(parcel.number, self._lying(parcel), content, task.resources, RETRIES)
            except (TypeError, ValueError) as error:  # resources that Ray does not understand
                self._done.append((task, _not_taken(task, error)))
                continue
            self._running[running] = task

    def _lying(self, parcel: Parcel) -> Any:
        for known, place in self._sent:
            if known is parcel:
                return place
        self._sent.append((parcel, self._cluster.ray.put(parcel.content)))
        return self._sent[-1][1]

    def _listen(self) -> None:
        """Wait until a task is done or given up."""
        ray = self._cluster.ray
        for one in ray.wait(list(self._running), num_returns=1)[0]:
            task = self._running.pop(one)
            try:
                result = unpacked_result(ray.get(one))
            except ray.exceptions.RayTaskError as error:  # before the work began: saltflat itself is not there
                result = not_found(error)
            except ray.exceptions.RayError as error:
                result = died(f"ended ({first_line(error)})")
            self._done.append((task, result))


def _not_taken(task: Task, error: Exception) -> Failure:
    return Failure(
        f"Got the resources {dict(task.resources)} of the task {task.key!r}: {first_line(error)}. "
        "Want numbers that Ray takes. Do: cpus and gpus from 0, whole numbers above 1."
    )
