"""The record of one measurement during a training, and a live table of records."""

from __future__ import annotations

import atexit
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from typing import TypeAlias

from rich import box, get_console
from rich.console import Console
from rich.errors import LiveError
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from saltflat.results.text import format_number, make_printable

PREFIX = "flatness"
EDGE_NAME = "lr_lambda_max"
THRESHOLD_NAME = "lr_lambda_max_threshold"  # beyond it the optimizer diverges on a parabola


def strip_prefix(name: str) -> str:
    """Return a name without its prefix.

    >>> strip_prefix("flatness/hessian_trace/0.weight")
    'hessian_trace/0.weight'
    """
    return name.split("/", 1)[-1]


class MonitorWarning(UserWarning):
    """Warn that a measurement or a logger failed or needs care; training continues."""


@dataclass(frozen=True)
class Record:
    """The values of one measurement; floats only, so a long history stays small.

    Attributes:
        step: training steps completed.
        epoch: epochs completed.
        values: by name, such as ``"flatness/hessian_trace"``; nan where the measurement failed.
        seconds: how long the measurement took.
        notes: what could not be measured, and why; and caveats about the values, in the first record they apply to.
        skipped: the steps (or epochs, for an interval in epochs) since the previous record at which a measurement was
            due but not made, to stay below the cap.
    """

    step: int
    epoch: int
    values: Mapping[str, float]
    seconds: float
    notes: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()


# A name, the class of an error, or a logger's number with what failed.
Topic: TypeAlias = str | type[Exception] | tuple[int, str]


class OneTimeWarnings:
    """Issue each :class:`MonitorWarning` once."""

    def __init__(self) -> None:
        self._seen: set[Topic] = set()

    def __call__(self, topic: Topic, text: str) -> None:
        """Warn, unless there was a warning on this topic before."""
        if topic not in self._seen:
            self._seen.add(topic)
            warnings.warn(text, MonitorWarning, stacklevel=3)


COLUMNS = 5  # records shown side by side
STEADY = 0.01  # relative change that is no trend
ARROWS = {"up": "↑", "down": "↓", "steady": "→", "": ""}
ASCII = {"up": "+", "down": "-", "steady": "=", "": ""}


class Table:
    """A live table: one row per measure, one column per recent record, and the trend of each measure.

    Other output appears above it, and rich's own progress bars next to it. Without a terminal, every record is printed
    as one line instead.

    Args:
        console: a rich console; the default one if None.
        columns: how many records are shown.
        live: pass False to print lines in a terminal, too; other progress bars (tqdm) conflict with a live table.
    """

    def __init__(self, console: Console | None = None, columns: int = COLUMNS, live: bool = True) -> None:
        self.console = get_console() if console is None else console
        self._may_live = live
        self._records: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=max(2, columns))
        self._live: Live | None = None

    def log(self, values: Mapping[str, float], step: int, epoch: int | None = None) -> None:
        """Add a record to the table."""
        before = self._records[-1][1] if self._records else {}
        self._records.append((step, dict(values)))
        if self._live is None and self._may_live and self.console.is_terminal:
            self._start_live()
        if self._live is None:
            self.console.print(self.render_line(values, before, step, epoch), soft_wrap=True)
        else:
            self._live.update(self.render_grid(), refresh=True)

    def close(self) -> None:
        """Stop updating; later output is printed below the table."""
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self.close)
        self._live = None

    def render_line(
        self, values: Mapping[str, float], before: Mapping[str, float], step: int, epoch: int | None = None
    ) -> Text:
        """Return one record as a line, without the contributions of single layers."""
        text = Text(f"step {step}" + ("" if epoch is None else f", epoch {epoch}"))
        for name in _select_rows(values):
            text.append(f"  {_format_label(name)} ", "dim").append(_render_cell(name, values))
            text.append(self._format_arrow(before.get(name), values[name]))
        return text

    def render_grid(self) -> Grid:
        """Return the table of recent records."""
        _, latest = self._records[-1]
        _, before = self._records[-2] if len(self._records) > 1 else (0, {})
        grid = Grid("step", box=box.SIMPLE_HEAD, title="Flatness", title_justify="left")
        for step, _ in self._records:
            grid.add_column(str(step), justify="right", no_wrap=True)
        grid.add_column("", no_wrap=True)
        # A table taller than the screen cannot be redrawn in place.
        rows, most = _select_rows(latest), max(1, self.console.height - 8)
        for name in rows[:most]:
            cells = [_render_cell(name, values) if name in values else Text() for _, values in self._records]
            grid.add_row(_format_label(name), *cells, self._format_arrow(before.get(name), latest[name]))
        if len(rows) > most:
            grid.caption = f"and {len(rows) - most} more"
        return grid

    def _start_live(self) -> None:
        live = Live(console=self.console, auto_refresh=False)
        try:
            live.start()
        except LiveError:  # rich before 14.1, with another live display on this console
            return
        self._live = live
        atexit.register(self.close)  # otherwise the cursor would stay hidden

    def _format_arrow(self, before: float | None, now: float) -> str:
        return (ASCII if self.console.options.ascii_only else ARROWS)[_compute_trend(before, now)]


def _select_rows(values: Mapping[str, float]) -> list[str]:
    """Return the names that belong to the whole network."""
    return [name for name in values if "/" not in strip_prefix(name) and strip_prefix(name) != THRESHOLD_NAME]


def _format_label(name: str) -> str:
    return "lr * lambda_max" if strip_prefix(name) == EDGE_NAME else make_printable(strip_prefix(name))


def _render_cell(name: str, values: Mapping[str, float]) -> Text:
    value = values[name]
    text = Text("nan" if isnan(value) else format_number(value))
    threshold = values.get(name.replace(EDGE_NAME, THRESHOLD_NAME)) if strip_prefix(name) == EDGE_NAME else None
    if threshold is not None and not isnan(value):
        text.append(f" {'>' if value > threshold else '<'} {format_number(threshold)}")
        if value > threshold:
            text.stylize("bold red")
    return text


def _compute_trend(before: float | None, now: float) -> str:
    if before is None or not isfinite(before) or not isfinite(now):
        return ""
    if abs(now - before) <= STEADY * max(abs(now), abs(before)):
        return "steady"
    return "up" if now > before else "down"
