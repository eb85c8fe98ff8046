"""The figures of the atlas, from the numbers of its parts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis import LOSS, analyze_part
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from parts import CONTROLS, MEASURES, Part
from tables import label

BLUE, RED, GRAY = "#0072b2", "#d55e00", "0.45"
ROWS = (*(name for name in MEASURES if name not in CONTROLS), *CONTROLS, LOSS, "noise")
DPI = 150
COLUMNS = 3  # kinds of network beside each other


def draw_figures(parts: Mapping[str, Part], out: Path) -> Iterator[Path]:
    """Draw every figure for which there are numbers, and yield its path."""
    found = {name: analyze_part(part, out) for name, part in parts.items() if (out / name / "rows.tar.xz").exists()}
    found = {name: each for name, each in found.items() if "scores" in each}
    equal = {name: each for name, each in found.items() if parts[name].arm == "equal-loss"}
    if not equal:
        return
    for name, draw in {"ranking": draw_ranking, "rescaled": draw_rescaled, "cost": draw_cost}.items():
        lines, columns = -(-len(equal) // COLUMNS), min(len(equal), COLUMNS)
        size = 2.6 + 2.9 * columns, lines * (1.2 + 0.23 * len(ROWS))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(lines, columns, sharey=name != "cost", squeeze=False).flat
        for panel in panels[len(equal) :]:
            panel.set_axis_off()
        for panel, (part, each) in zip(panels, equal.items(), strict=False):
            panel.set_title(parts[part].title, fontsize=9)
            draw(panel, each, found.get(part.replace("equal-loss", "equal-epochs")))
        yield save(figure, out / f"{name}.png")
    for part, each in equal.items():
        yield save(draw_fragility(each["fragility"]), out / f"fragility-{parts[part].pair}.png")


def draw_fragility(shifts: dict[str, Any]) -> Figure:
    """Draw how much of each order survives every change, a panel each."""
    wide = 2 * COLUMNS
    lines, columns = -(-len(shifts) // wide), min(len(shifts), wide)
    size = 2.6 + 1.5 * columns, lines * (1.0 + 0.23 * len(MEASURES))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flat
    for panel in panels[len(shifts) :]:
        panel.set_axis_off()
    for panel, (name, shift) in zip(panels, shifts.items(), strict=False):
        panel.set_title(name, fontsize=8)
        draw_survival(panel, shift["survivals"])
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure."""
    figure.savefig(path, dpi=DPI)
    return path


def draw_rows(panel: Axes, names: tuple[str, ...]) -> None:
    """Label the rows of a panel."""
    panel.set_yticks(range(len(names)), [label(name) for name in names], fontsize=7)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.axvline(0, color="0.8", linewidth=0.8)
    panel.tick_params(axis="both", length=0, labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def draw_mark(panel: Axes, row: float, found: Any, color: str, filled: bool) -> None:
    """Draw an estimate with its interval."""
    value, low, high = found
    if value is None:
        return
    if low is not None and high is not None:
        panel.plot([low, high], [row, row], color=color, linewidth=1)
    panel.plot([value], [row], "o", color=color, markerfacecolor=color if filled else "white", markersize=4)


def draw_ranking(panel: Axes, found: dict[str, Any], other: dict[str, Any] | None) -> None:
    """Draw tau-b of every measure and control, in both arms."""
    draw_rows(panel, ROWS)
    for row, name in enumerate(ROWS):
        color = GRAY if name in (*CONTROLS, LOSS, "noise") else BLUE
        draw_mark(panel, row - 0.15, found["scores"][name]["kendall_b"], color, True)
        if other is not None:
            draw_mark(panel, row + 0.15, other["scores"][name]["kendall_b"], color, False)
    panel.set_xlabel("tau-b with the gap", fontsize=8)


def draw_rescaled(panel: Axes, found: dict[str, Any], _: dict[str, Any] | None) -> None:
    """Draw tau-b before and after rescaling."""
    draw_rows(panel, MEASURES)
    for row, name in enumerate(MEASURES):
        each = found["rescaled"].get(name)
        if each is not None:
            draw_mark(panel, row - 0.15, each["before"], BLUE, True)
            draw_mark(panel, row + 0.15, each["after"], RED, False)
    panel.set_xlabel("blue: as trained, red: rescaled", fontsize=8)


def draw_survival(panel: Axes, survivals: dict[str, Any]) -> None:
    """Draw how much of each order survives one change."""
    draw_rows(panel, MEASURES)
    _, low, high = survivals["gap_error"]["tau"]
    if low is not None and high is not None:
        panel.axvspan(low, high, color="0.92", zorder=0)
    for row, name in enumerate(MEASURES):
        each = survivals.get(name)
        if each is not None:
            clear = {"less than the gap": RED, "more than the gap": BLUE}.get(each["verdict"])
            draw_mark(panel, row, each["tau"], clear or GRAY, clear is not None)


def draw_cost(panel: Axes, found: dict[str, Any], _: dict[str, Any] | None) -> None:
    """Draw tau-b against the seconds that a measure takes."""
    costs = found["costs"]
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=7)
    for name, seconds in (costs or {"seconds": {}})["seconds"].items():
        if name == "normalized_sharpness_arxiv":  # twice normalized_sharpness, which it would hide
            continue
        value = found["scores"].get(name, {}).get("kendall_b", [None])[0]
        if value is not None:
            panel.plot([seconds], [value], "o", color=GRAY if name in CONTROLS else BLUE, markersize=4)
            panel.annotate(name, (seconds, value), fontsize=5, xytext=(3, 1), textcoords="offset points")
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.tick_params(axis="x", which="both", labelsize=7)
    panel.set_xlabel("seconds a network", fontsize=8)
    panel.set_ylabel("tau-b with the gap", fontsize=8)
