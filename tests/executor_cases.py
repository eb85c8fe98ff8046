"""Tasks for executors, what is done with them, and a look at the processes that do it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

PATIENCE = 60.0  # seconds; of a test that would otherwise wait for ever


@dataclass(frozen=True)
class Task:
    key: str
    folder: Path = Path()
    resources: Mapping[str, float] = field(default_factory=dict)


def tasks(*keys: object, folder: Path = Path()) -> list[Task]:
    return [Task(str(key), folder) for key in keys]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and only waits to be noticed does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def descendants(pid: int) -> set[int]:
    """Processes that this one started, and those that they started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:  # gone meanwhile
            continue
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def pids(folder: Path) -> set[int]:
    return {int(each.name.split("-")[-1]) for each in folder.glob("pid-*")}


def network(task: Task) -> dict[str, Tensor]:
    """Numbers that depend on the task alone."""
    generator = torch.Generator().manual_seed(int(task.key))
    weight = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return {"weight": weight, "gram": weight @ weight.T, "seed": torch.tensor(int(task.key))}


def raising(task: Task) -> int:
    return 10 // int(task.key)


class StrangeError(Exception):
    """An error that cannot be rebuilt from its arguments, and has no text."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise AttributeError("no text")


def strange(task: Task) -> None:
    raise StrangeError(3, task.key)


def patient(task: Task) -> str:
    """All but the last wait for nothing; the last for the first result to be seen."""
    if task.key == "last":
        wait_until((task.folder / "seen").exists, "the first result was seen")
    return task.key


def upper(task: Task) -> str:
    return task.key.upper()


def length(task: Task) -> int:
    return len(task.key)


def many_tensors(task: Task) -> list[Tensor]:
    return [torch.full((3,), float(i)) for i in range(int(task.key))]


def killed_once(task: Task) -> dict[str, Tensor]:
    """Says in a file who it is and waits to be killed; the second time it does its work."""
    if task.key == "3" and not list(task.folder.glob("pid-*")):
        (task.folder / f"pid-{os.getpid()}").touch()
        time.sleep(PATIENCE)
    return network(task)


def killing(task: Task) -> str:
    if task.key == "bad":
        with (task.folder / "tries").open("a", encoding="utf-8") as tries:
            tries.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return task.key


def killing_in_company(task: Task) -> str:
    """One that ends its worker twice, and then says who else was at work in a while; the others work for a while."""
    if task.key != "bad":
        mark = task.folder / f"running-{task.key}"
        mark.touch()
        time.sleep(0.3)
        mark.unlink()
        return task.key
    with (task.folder / "tries").open("a", encoding="utf-8") as tries:
        tries.write("x")
    if marks(task.folder / "tries") < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    beside: set[str] = set()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        beside |= {each.name for each in task.folder.glob("running-*")}
    return " ".join(sorted(beside))


def stuck(task: Task) -> str:
    """Says who it is, and keeps Python's lock for long: no other thread of its process does anything."""
    (task.folder / f"pid-{os.getpid()}").touch()
    ctypes.PyDLL(None).sleep(int(10 * PATIENCE))
    return task.key


def short(task: Task) -> str:
    time.sleep(0.7)
    return task.key


def endless(task: Task) -> str:
    if task.key != "quick":
        (task.folder / f"pid-{os.getpid()}").touch()
        time.sleep(10 * PATIENCE)
    return task.key


def leaving(task: Task) -> str:
    if task.key == "bad":
        sys.exit(3)
    return task.key


def locked(task: Task) -> object:
    return threading.Lock() if task.key == "bad" else task.key


def parent(task: Task) -> int:
    return os.getppid()


def threads(task: Task) -> int:
    return torch.get_num_threads()


@dataclass(frozen=True)
class Heavy:
    """Work that leaves a mark each time it is packed or unpacked."""

    folder: Path

    def __reduce__(self) -> tuple[Callable[[Path], Heavy], tuple[Path]]:
        _mark(self.folder / "packed")
        return unpacked, (self.folder,)

    def __call__(self, task: Task) -> str:
        return task.key


def unpacked(folder: Path) -> Heavy:
    _mark(folder / "unpacked")
    return Heavy(folder)


def _mark(path: Path) -> None:
    with path.open("a", encoding="utf-8") as marks:
        marks.write("x")


def marks(path: Path) -> int:
    return len(path.read_text(encoding="utf-8"))
