"""The history of a training as small panels over steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saltflat.integrations.record import EDGE_NAME, THRESHOLD_NAME, Record, strip_prefix
from saltflat.report.optional import import_optional
from saltflat.report.text import make_printable

ACROSS = 3


def plot_history(history: Sequence[Record]) -> Any:
    """A Figure with a panel for every value of the whole network; layers are lines in their measure's panel.

    Made without pyplot: there is no window, no current figure, and nothing to close.
    """
    names = list(dict.fromkeys(name for record in history for name in record.values))
    panels = [name for name in names if "/" not in strip_prefix(name) and strip_prefix(name) != THRESHOLD_NAME]
    across, down = min(ACROSS, max(1, len(panels))), max(1, -(-len(panels) // ACROSS))
    figure = import_optional("matplotlib.figure", "plot()").Figure(
        figsize=(4 * across, 2.6 * down), layout="constrained"
    )
    if not panels:
        figure.text(0.5, 0.5, "Nothing was measured yet.", ha="center")
    for place, panel in enumerate(panels):
        axis = figure.add_subplot(down, across, place + 1)
        axis.set_title(make_printable(strip_prefix(panel)), fontsize=9, parse_math=False)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        for name in names:
            if name.startswith(f"{panel}/"):
                _plot_line(axis, history, name, color="0.75", linewidth=0.8)
        _plot_line(axis, history, panel, color="C0", marker=".", linewidth=1.2)
        threshold = panel.replace(EDGE_NAME, THRESHOLD_NAME)
        if strip_prefix(panel) == EDGE_NAME and threshold in names:
            _plot_line(axis, history, threshold, color="C3", linestyle="--", linewidth=1)
    return figure


def _plot_line(axis: Any, history: Sequence[Record], name: str, **style: Any) -> None:
    points = [(record.step, record.values[name]) for record in history if name in record.values]
    axis.plot(*zip(*points, strict=True), **style)
