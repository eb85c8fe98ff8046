"""The paper's figures, and those of its tables, drawn from the rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from analysis import (
    BASELINES,
    CLAIMS,
    DATASETS,
    NETWORKS,
    Correlations,
    Found,
    Growth,
    compute_growth,
    compute_slopes,
    load,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

DPI = 150
THREE = ("normalized_sharpness", *BASELINES)
COLORS = dict(zip((*THREE, "training loss"), ("tab:blue", "tab:orange", "tab:green", "0.5"), strict=True))
LABELS = {
    "normalized_sharpness": "normalized sharpness",
    "hessian_trace": "trace of the Hessian",
    "squared_norm": "squared norm",
    "training loss": "training loss (control)",
    "fisher_rao_norm": "Fisher-Rao norm",
}


def draw_figures(out: Path) -> Iterator[Path]:
    """Draw the figures whose rows are there, and yield their paths.

    Args:
        out: folder with a folder for each study; the figures go into it.
    """
    tables = {
        (claim["dataset"], network): load(out / f"tables-{network}-{claim['dataset']}", keep_collapsed=False)
        for claim in CLAIMS[:2]
        for network in NETWORKS
    }
    known = {place: found for place, found in tables.items() if found is not None and found.is_enough}
    if known:
        yield save(draw_correlations(known), out / "tables.png")
        yield save(draw_gaps(known), out / "gaps.png")
    growths: dict[tuple[str, str], dict[str, Growth]] = {}
    for dataset in DATASETS:
        for network in NETWORKS:
            found = load(out / f"labels-{network}-{dataset}")
            grown = {} if found is None else {measure: compute_growth(found, measure) for measure in THREE}
            growths[dataset, network] = {measure: each for measure, each in grown.items() if each is not None}
    if any(growths.values()):
        yield save(draw_labels(growths), out / "figure1.png")
    for folder, name in {"depth-width": "figure2.png", "depth-width-equal-loss": "figure2_equal_loss.png"}.items():
        found = load(out / folder)
        if found is not None and compute_slopes(found, "normalized_sharpness") is not None:
            yield save(draw_shapes(found), out / name)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure, and return its path."""
    figure.savefig(path, dpi=DPI)
    return path


def draw_correlations(tables: dict[tuple[str, str], Found]) -> Figure:
    """Draw Tables 1 and 2: the correlations of the three measures with their intervals, and at equal loss."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True, squeeze=False)
    names = (*THREE, "training loss")
    for row, claim in enumerate(CLAIMS[:2]):
        for axes, (network, each) in zip(panels[row], NETWORKS.items(), strict=True):
            axes.set_title(f"{claim['where']}, {DATASETS[claim['dataset']]}: {each.title}", fontsize=9)
            axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
            found = tables.get((claim["dataset"], network))
            for place, name in enumerate(names):
                if found is not None:
                    values = found.loss if name == "training loss" else found.get_values(name)
                    one = found.correlate(values)
                    if one is not None:
                        draw_estimates(axes, one, place, COLORS[name], left=name != "training loss")
                if name in claim:
                    axes.plot(claim[name][network], place, "k|", markersize=14, markeredgewidth=1.6)
            axes.set_yticks(range(len(names)), [LABELS[name] for name in names], fontsize=8)
            axes.set_xlim(-1.05, 1.05)
            axes.set_ylim(len(names) - 0.5, -0.5)
    for axes in panels[-1]:
        axes.set_xlabel("Pearson correlation with the gap", fontsize=9)
    kinds = {"paper": ("k", "|"), "here": ("0.3", "o"), "here, at equal training loss": ("0.3", "s")}
    for label, (color, marker) in kinds.items():
        filled = "none" if marker == "s" else color
        panels[0][0].plot([], [], color=color, marker=marker, linestyle="", label=label, markerfacecolor=filled)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def draw_estimates(axes: Axes, one: Correlations, place: int, color: str, left: bool) -> None:
    """Draw a correlation with its interval, and below it what is left at equal loss."""
    shown = [(one.pearson, -0.13, "o", color)] + ([(one.pearson_left, 0.17, "s", "none")] if left else [])
    for estimate, shift, marker, filled in shown:
        if np.isnan(estimate.value):
            continue
        reach = [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]
        axes.errorbar(
            [estimate.value], [place + shift], xerr=np.nan_to_num(reach), color=color, marker=marker,
            markerfacecolor=filled, markersize=5, capsize=2.5, linewidth=1.2,
        )  # fmt: skip


def draw_gaps(tables: dict[tuple[str, str], Found]) -> Figure:
    """Draw the gap against normalized sharpness, a point for each network, colored by its training loss."""
    figure = Figure(figsize=(10.5, 6), layout="constrained")
    panels = figure.subplots(2, 3, squeeze=False)
    for row, dataset in enumerate(DATASETS):
        for axes, (network, each) in zip(panels[row], NETWORKS.items(), strict=True):
            axes.set_title(f"{DATASETS[dataset]}: {each.title}", fontsize=9)
            found = tables.get((dataset, network))
            if found is None:
                axes.text(0.5, 0.5, "not tested", ha="center", va="center", transform=axes.transAxes, color="0.5")
                axes.set_axis_off()
                continue
            values = found.get_values("normalized_sharpness")
            colors = axes.scatter(values, found.gap, c=found.log_loss / np.log(10), s=14, cmap="viridis")
            figure.colorbar(colors, ax=axes).set_label("log10 of the training loss", fontsize=8)
            axes.locator_params(nbins=5)
            axes.set_xlabel("normalized sharpness", fontsize=9)
            axes.set_ylabel("test error - training error", fontsize=9)
    return figure


def draw_labels(growths: dict[tuple[str, str], dict[str, Growth]]) -> Figure:
    """Draw Figure 1: three measures, each rescaled to [0, 1] for a network, against the share of random labels."""
    networks = [network for network in NETWORKS if any(growths[dataset, network] for dataset in DATASETS)]
    figure = Figure(figsize=(9, 2.6 * len(networks) + 0.6), layout="constrained")
    panels = figure.subplots(len(networks), 2, sharex=True, sharey=True, squeeze=False)
    for row, network in enumerate(networks):
        for axes, dataset in zip(panels[row], DATASETS, strict=True):
            axes.set_title(f"{DATASETS[dataset]}: {NETWORKS[network].title}", fontsize=10)
            for measure, growth in growths[dataset, network].items():
                low, reach = growth.means.min(), np.ptp(growth.means) or 1.0
                axes.errorbar(
                    growth.shares, (growth.means - low) / reach, yerr=growth.deviations / reach, label=LABELS[measure],
                    color=COLORS[measure], marker="o", markersize=3.5, capsize=2.5, linewidth=1.3,
                )  # fmt: skip
            if not growths[dataset, network]:
                axes.text(0.5, 0.5, "no rows yet", ha="center", va="center", transform=axes.transAxes, color="gray")
        panels[row][0].set_ylabel("rescaled to [0, 1]", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("share of random labels", fontsize=9)
    handles, labels = next(
        axes.get_legend_handles_labels() for axes in panels.flat if axes.get_legend_handles_labels()[0]
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def draw_shapes(found: Found) -> Figure:
    """Draw Figure 2: normalized sharpness, and the Fisher-Rao norm, against depth and width."""
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    for row, measure in enumerate(("normalized_sharpness", "fisher_rao_norm")):
        slopes = compute_slopes(found, measure)
        for axes, axis, other in zip(panels[row], ("depth", "width"), ("width", "depth"), strict=True):
            draw_lines(axes, found, measure, axis, other)
            slope = "" if slopes is None else f"\nslope {getattr(slopes, axis)}"
            axes.set_title(f"{LABELS[measure]} against {axis}{slope}", fontsize=10)
            if row == 0:  # the same lines below
                axes.legend(fontsize=8)
        panels[row][0].set_ylabel(LABELS[measure], fontsize=9)
    return figure


def draw_lines(axes: Axes, found: Found, measure: str, axis: str, other: str) -> None:
    """Draw means with standard deviations over seeds, a line for each value of the other setting."""
    values, x, kinds = found.get_values(measure), found.get_setting(axis), found.get_setting(other)
    ticks: list[Any] = sorted(set(x))
    shades = np.linspace(0.15, 0.85, len(set(kinds)))
    for shade, kind in zip(shades, sorted(set(kinds)), strict=True):
        places = sorted(set(x[kinds == kind]))
        groups = [values[(kinds == kind) & (x == place)] for place in places]
        means = np.array([group.mean() for group in groups])
        spread = np.array([group.std(ddof=1) if len(group) > 1 else 0.0 for group in groups])
        color = (0.1 + 0.6 * shade, 0.35, 0.95 - 0.7 * shade)
        axes.errorbar(
            places, means, yerr=spread, label=f"{other} {kind:g}", color=color, marker="o", markersize=4, capsize=2.5
        )
    middle = float(np.exp(np.log(values[values > 0]).mean()))
    center = float(np.exp(np.log(ticks).mean()))
    axes.plot(ticks, [middle * tick / center for tick in ticks], "k:", linewidth=1, label="slope 1")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("hidden layers" if axis == "depth" else "units of a layer", fontsize=9)
