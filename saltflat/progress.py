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
    total = _count(data)
    if callable(progress):
        yield lambda done: progress(done, total)
        return
    if progress is not None and not isinstance(progress, bool):
        raise OptionError(
            f"Got progress={progress!r}. Want True, False, None or a function of (done, total). Do: leave it out."
        )
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Sweeping examples", total=total)
        yield lambda done: bar.update(task, completed=done)


def _count(data: Any) -> int | None:
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
