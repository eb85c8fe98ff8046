"""The record of one measurement during a training, and a live table of records."""

from __future__ import annotations

import atexit
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan

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
    """A name without its prefix.

    >>> strip_prefix("flatness/hessian_trace/0.weight")
    'hessian_trace/0.weight'
    """
    return name.split("/", 1)[-1]


class MonitorWarning(UserWarning):
    """Something about a measurement or a logger is not as it seems; the training goes on."""


@dataclass(frozen=True)
class Record:
    """Numbers of one moment; floats only, so a long history is small.

    Attributes:
        step: training steps done by then.
        epoch: epochs done by then.
        values: by name, such as ``"flatness/hessian_trace"``; nan where it could not be measured.
        seconds: how long it took.
        notes: what could not be measured, and why; and what there is to say of the values, when it is true first.
        skipped: the steps (or epochs, if it is measured by these) since the record before at which a measurement was
            due, and was not made then to keep below the cap.
    """

    step: int
    epoch: int
    values: Mapping[str, float]
    seconds: float
    notes: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()


class OneTimeWarnings:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def __call__(self, about: object, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warnings.warn(text, MonitorWarning, stacklevel=3)


COLUMNS = 5  # records shown side by side
STEADY = 0.01  # relative change that is no trend
ARROWS = {"up": "↑", "down": "↓", "steady": "→", "": ""}
ASCII = {"up": "+", "down": "-", "steady": "=", "": ""}


class Table:
    """Measures from top to bottom, the last few moments from left to right, and where each measure is going.

    Anything printed meanwhile appears above it, and rich's own progress bars beside it. Where there is no terminal,
    every moment is one line instead.

    Args:
        console: of rich; the one that rich uses itself if None.
        columns: how many moments are shown.
        live: False for lines in a terminal too: other progress bars (tqdm) do not share the screen with a table.
    """

    def __init__(self, console: Console | None = None, columns: int = COLUMNS, live: bool = True) -> None:
        self.console = get_console() if console is None else console
        self._may_live = live
        self._moments: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=max(2, columns))
        self._live: Live | None = None

    def log(self, values: Mapping[str, float], step: int, epoch: int | None = None) -> None:
        before = self._moments[-1][1] if self._moments else {}
        self._moments.append((step, dict(values)))
        if self._live is None and self._may_live and self.console.is_terminal:
            self._start_live()
        if self._live is None:
            self.console.print(self.render_line(values, before, step, epoch), soft_wrap=True)
        else:
            self._live.update(self.render_grid(), refresh=True)

    def close(self) -> None:
        """Leave the table where it is; what follows is printed below."""
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self.close)
        self._live = None

    def render_line(
        self, values: Mapping[str, float], before: Mapping[str, float], step: int, epoch: int | None = None
    ) -> Text:
        """One moment on one line, without what single layers contribute."""
        text = Text(f"step {step}" + ("" if epoch is None else f", epoch {epoch}"))
        for name in _select_rows(values):
            text.append(f"  {_format_label(name)} ", "dim").append(_render_cell(name, values))
            text.append(self._format_arrow(before.get(name), values[name]))
        return text

    def render_grid(self) -> Grid:
        """The table of the last few moments."""
        _, latest = self._moments[-1]
        _, before = self._moments[-2] if len(self._moments) > 1 else (0, {})
        grid = Grid("step", box=box.SIMPLE_HEAD, title="Flatness", title_justify="left")
        for step, _ in self._moments:
            grid.add_column(str(step), justify="right", no_wrap=True)
        grid.add_column("", no_wrap=True)
        # What is taller than the screen cannot be drawn over.
        rows, most = _select_rows(latest), max(1, self.console.height - 8)
        for name in rows[:most]:
            cells = [_render_cell(name, values) if name in values else Text() for _, values in self._moments]
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
        atexit.register(self.close)  # a hidden cursor would stay hidden

    def _format_arrow(self, before: float | None, now: float) -> str:
        return (ASCII if self.console.options.ascii_only else ARROWS)[_compute_trend(before, now)]


def _select_rows(values: Mapping[str, float]) -> list[str]:
    """The names that belong to the whole network."""
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
