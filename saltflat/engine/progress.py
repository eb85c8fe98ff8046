"""Progress of long passes: bars, lines of text, calls of the user's function, and remaining time."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text
from torch import Tensor
from torch.utils.data import DataLoader

from saltflat.engine.data import Data, RepeatableData
from saltflat.engine.read_data import DataSelection, DeviceBatches
from saltflat.errors import OptionError

EVERY = 10.0  # seconds between two lines of text

Progress = Callable[[str, int, int | None], None]  # of the step, what is done of it, and how much there is


class Forecast:
    """Estimates the remaining time of a run from the speed of a forward pass and of the steps so far.

    Args:
        passes: about how many forward passes over the data each step takes, by its name and in order; None if only the
            step itself can tell.
        clock: returns the time in seconds.
        seconds: the seconds that steps take, by name, where they are known better than by passes.

    Attributes:
        per_example: seconds that a forward pass takes per example; None if unknown.
        examples: number of examples; None if unknown.
    """

    def __init__(
        self,
        passes: Mapping[str, float | None],
        clock: Callable[[], float] = time.perf_counter,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.per_example: float | None = None
        self.examples: int | None = None
        self._seconds = dict(seconds or {})
        self._passes = {**dict(passes), **dict.fromkeys(self._seconds.keys() - passes.keys(), 0.0)}
        self._waiting, self._clock = list(self._passes), clock
        self._step = ""
        self._done, self._started = 0, clock()
        self._total: int | None = None
        # Of the finished steps: the expected and the actual number of seconds.
        self._expected = self._taken = 0.0

    def begin(self, step: str) -> None:
        """Start a step."""
        self._step = step
        if step in self._waiting:
            self._waiting.remove(step)
        self._done, self._total, self._started = 0, None, self._clock()

    def advance(self, done: int, total: int | None) -> None:
        """Record how much of the current step is done."""
        self._done, self._total = done, total

    def end(self) -> None:
        """Finish the current step."""
        expected = self._estimate_seconds(self._step)
        if expected:
            self._expected += expected
            self._taken += self._clock() - self._started
        self._step = ""

    def estimate_seconds_left(self) -> float | None:
        """Return about how many seconds all remaining steps take together, or None if that is not known yet."""
        later = [self._estimate_seconds(step) for step in self._waiting]
        now = self._estimate_step_left() if self._step else 0.0
        if now is None or any(each is None for each in later):
            return None
        # Passes may be quicker or slower than the one that was timed.
        pace = self._taken / self._expected if self._expected else 1.0
        return now + pace * sum(each for each in later if each is not None)

    def _estimate_seconds(self, step: str) -> float | None:
        if step in self._seconds:
            return self._seconds[step]
        passes = self._passes.get(step, 0.0)
        if not passes:
            return passes
        if self.per_example is None or self.examples is None:
            return None
        return passes * self.per_example * self.examples

    def _estimate_step_left(self) -> float | None:
        elapsed = self._clock() - self._started
        if self._done and self._total:
            return elapsed * max(self._total / self._done - 1, 0.0)
        expected = self._estimate_seconds(self._step)
        # A step that takes longer than expected is unlikely to be near its end.
        return None if expected is None else max(expected - elapsed, 0.1 * elapsed)


class StepProgress:
    """A function to call with the current step, the amount done, and the total.

    Attributes:
        forecast: of the whole run, if there is one.
        error: raised by the user's function, kept so that it is not mistaken for one of the model.
    """

    def __init__(self, show: Callable[[str, int, int | None, float | None], None] | None) -> None:
        self._show = show
        self.forecast: Forecast | None = None
        self.error: Exception | None = None

    @property
    def is_visible(self) -> bool:
        """Return whether progress is shown at all."""
        return self._show is not None

    def __call__(self, step: str, done: int, total: int | None) -> None:
        if self._show is None:
            return
        left = None
        if self.forecast is not None:
            self.forecast.advance(done, total)
            left = self.forecast.estimate_seconds_left()
        try:
            self._show(step, done, total, left)
        except Exception as error:
            self.error = error
            raise


@contextmanager
def show_steps(progress: bool | Callable[..., None] | None) -> Iterator[StepProgress]:
    """Yield a function that reports every step to the user's function or to a bar on the terminal."""
    if callable(progress) and not isinstance(progress, type):
        yield StepProgress(_adapt_callback(progress))
        return
    _check_progress(progress)
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield StepProgress(None)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield StepProgress(_LineProgress())
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RunRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(step: str, done: int, total: int | None, left: float | None) -> None:
            if step not in tasks:
                for before in tasks.values():
                    bar.update(before, visible=False)
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done, total=total, left=left)

        yield StepProgress(show)


def _adapt_callback(progress: Callable[..., None]) -> Callable[[str, int, int | None, float | None], None]:
    """Return the user's function, called with the seconds left if it has a parameter for them."""
    try:
        takes = "seconds_left" in inspect.signature(progress).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        takes = False
    if takes:
        return lambda step, done, total, left: progress(step, done, total, seconds_left=left)
    return lambda step, done, total, left: progress(step, done, total)


class _LineProgress:
    """Prints lines of text, for files and pipes: one for every step, and one every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._step, self._last = clock, "", 0.0

    def __call__(self, step: str, done: int, total: int | None, left: float | None) -> None:
        now = self._clock()
        if step == self._step and now - self._last < EVERY:
            return
        self._step, self._last = step, now
        of = "" if total is None else f" of {total}"
        rest = "" if left is None else f", about {format_duration(left)} left in all"
        print(f"{step}: {done}{of}{rest}", file=sys.stderr, flush=True)


class _RunRemainingColumn(TimeRemainingColumn):
    """Shows the remaining time of the whole run if it is known, and of the step otherwise."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return super().render(task) if left is None else Text(f"about {format_duration(left)} left in all")


def format_duration(seconds: float) -> str:
    """Return a duration in words.

    >>> format_duration(0.4), format_duration(95), format_duration(3700)
    ('1 s', '2 min', '1 h 2 min')
    """
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    hours, minutes = divmod(max(round(seconds / 60), 1), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _check_progress(progress: bool | Callable[..., None] | None) -> None:
    if progress is not None and not isinstance(progress, bool):
        raise OptionError(
            f"Expected True, False, None or a function, but got progress={progress!r}. Try leaving it out."
        )


def count_examples(data: Data) -> int | None:
    """Return about how many examples there are, or None if that is not known without reading them."""
    if isinstance(data, DataSelection):
        return data.count_examples(count_examples(data.data))
    if isinstance(data, DeviceBatches):
        return count_examples(data.data)
    if isinstance(data, RepeatableData):
        data = data.data
    counted: Any = None
    if isinstance(data, DataLoader):
        counted = data.dataset
    elif isinstance(data, tuple | list) and data and isinstance(data[0], Tensor):
        counted = data[0]
    elif isinstance(data, Tensor):
        counted = data
    try:
        return len(counted)
    except TypeError:  # unknown
        return None
