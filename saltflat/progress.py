"""How far a long pass has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import Tensor
from torch.utils.data import DataLoader

from saltflat.errors import OptionError

Progress = Callable[[int, int | None], None]


@contextmanager
def shown(progress: bool | Progress | None, data: Any) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of examples done."""
    total = count(data)
    if callable(progress):
        yield lambda done: progress(done, total)
        return
    _check(progress)
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Sweeping examples", total=total)
        yield lambda done: bar.update(task, completed=done)


Tick = Callable[[str, int, int | None], None]


class Told:
    """A user's function; an error in it is kept, so that it is not taken for one of the model."""

    def __init__(self, tell: Tick) -> None:
        self.tell = tell
        self.error: Exception | None = None

    def __call__(self, step: str, done: int, total: int | None) -> None:
        try:
            self.tell(step, done, total)
        except Exception as error:
            self.error = error
            raise


@contextmanager
def steps_shown(progress: bool | Tick | None) -> Iterator[Tick]:
    """A function to call with the step at hand, how much of it is done, and how much there is."""
    if callable(progress):
        yield Told(progress)
        return
    _check(progress)
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda step, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def tick(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                for before in tasks.values():
                    bar.update(before, visible=False)
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done, total=total)

        yield tick


def _check(progress: bool | None) -> None:
    if progress is not None and not isinstance(progress, bool):
        raise OptionError(f"Got progress={progress!r}. Want True, False, None or a function. Do: leave it out.")


def count(data: Any) -> int | None:
    """Number of examples, where it is known without reading them."""
    if isinstance(data, DataLoader):
        data = data.dataset
    elif isinstance(data, tuple | list) and data and isinstance(data[0], Tensor):
        data = data[0]
    elif not isinstance(data, Tensor):
        return None
    try:
        return len(data)
    except TypeError:
        return None
