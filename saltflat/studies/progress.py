"""How far a study has come."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from saltflat.errors import OptionError
from saltflat.report.text import make_printable


class ProgressDisplay(Protocol):
    """What is called while a study runs."""

    def begin(self, to_train: int, to_measure: int) -> None:
        """So many runs are to be trained, and so many measured."""

    def update_epochs(self, done: int, most: int) -> None:
        """Of the networks that are being trained in this process."""

    def add_trained(self, runs: int) -> None:
        """So many more are trained."""

    def add_finished(self, status: str) -> None:
        """One more run is finished: done, missed, diverged or failed."""

    def tell(self, text: str) -> None:
        """Something a person should know."""


class SilentDisplay:
    """Tells nothing."""

    def begin(self, to_train: int, to_measure: int) -> None: ...

    def update_epochs(self, done: int, most: int) -> None: ...

    def add_trained(self, runs: int) -> None: ...

    def add_finished(self, status: str) -> None: ...

    def tell(self, text: str) -> None: ...


class BarDisplay:
    """Three bars on a terminal: networks trained, epochs of those at hand, runs finished."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.failed = bar, 0
        self.training = bar.add_task("Networks trained", visible=False)
        self.stack = bar.add_task("  epochs at hand", visible=False)
        self.rows = bar.add_task("Runs finished", visible=False)

    def begin(self, to_train: int, to_measure: int) -> None:
        self.bar.update(self.training, total=to_train, visible=to_train > 0)
        self.bar.update(self.rows, total=to_measure, visible=to_measure > 0)

    def update_epochs(self, done: int, most: int) -> None:
        self.bar.update(self.stack, completed=done, total=most, visible=True)

    def add_trained(self, runs: int) -> None:
        self.bar.advance(self.training, runs)
        self.bar.update(self.stack, visible=False)

    def add_finished(self, status: str) -> None:
        self.failed += status in ("failed", "diverged")
        told = f" ({self.failed} failed or diverged)" if self.failed else ""
        self.bar.update(self.rows, advance=1, description=f"Runs finished{told}")

    def tell(self, text: str) -> None:
        self.bar.console.print(Text(make_printable(text), style="yellow"), soft_wrap=True)


class LineDisplay(SilentDisplay):
    """Only what a person should know, as lines on the standard error."""

    def tell(self, text: str) -> None:
        Console(stderr=True).print(Text(make_printable(text), style="yellow"), soft_wrap=True)


@contextmanager
def show_progress(progress: bool | ProgressDisplay | None) -> Iterator[ProgressDisplay]:
    """Bars where they are wanted, or on a terminal if nobody said; else only what a person should know."""
    if progress is False:
        yield SilentDisplay()
    elif progress is True or (progress is None and sys.stderr.isatty()):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            yield BarDisplay(bar)
    elif progress is None:
        yield LineDisplay()
    elif hasattr(progress, "begin"):
        yield progress
    else:
        raise OptionError(f"Got progress={progress!r}. Want True, False or None. Do: leave it out.")
