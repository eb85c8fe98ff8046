"""Spectra as pictures: the density with its band, and the eigenvalues that were searched for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saltflat.report.optional import import_optional
from saltflat.report.text import format_number, make_printable
from saltflat.spectrum.view import MATRIX, select_largest_blocks

if TYPE_CHECKING:
    from saltflat.spectrum.result import Block, Spectrum

# Told apart without colors, too (Okabe and Ito).
LINE, LARGEST, SMALLEST = "#0072b2", "#d55e00", "#009e73"
MOST = 12  # layers in one picture
ACROSS = 3


def plot_spectrum(spectrum: Spectrum, width: float | None = None) -> Any:
    """A Figure, made without pyplot: there is no window, no current figure, and nothing to close."""
    blocks = select_largest_blocks(spectrum, MOST)
    across = min(ACROSS, len(blocks))
    down = -(-len(blocks) // across)
    size = (6.4, 4.2) if len(blocks) == 1 else (3.6 * across, 0.6 + 2.6 * down)
    figure = import_optional("matplotlib.figure", "plot()").Figure(figsize=size, layout="constrained")
    for place, block in enumerate(blocks, 1):
        axis = figure.add_subplot(down, across, place)
        _draw_block(axis, block, width)
        title = spectrum.model if len(blocks) == 1 else block.name
        axis.set_title(make_printable(title), fontsize=10 if len(blocks) == 1 else 9, parse_math=False)
        if place == 1:
            axis.legend(frameon=False, fontsize=8)
    figure.supxlabel(f"eigenvalue of the {MATRIX.get(str(spectrum.settings.get('matrix')), 'curvature')}", fontsize=10)
    if any(block.has_density for block in blocks):
        figure.supylabel("density", fontsize=10)
    left = len(spectrum) - len(blocks)
    if left:
        figure.suptitle(
            f"{make_printable(spectrum.model)}: {len(blocks)} layers, and {left} more with less", fontsize=10
        )
    return figure


def _draw_block(axis: Any, block: Block, width: float | None) -> None:
    if block.has_density:
        found = block.density(width=width)
        axis.fill_between(found.grid, found.low, found.high, color=LINE, alpha=0.25, linewidth=0, label="95 % interval")
        axis.plot(
            found.grid,
            found.value,
            color=LINE,
            linewidth=1.2,
            label=f"density, smoothed by {format_number(found.width, 2)}",
        )
        axis.set_yscale("log", nonpositive="clip")
        # Below a part of what a single eigenvalue adds there is nothing to see.
        single = 1 / (block.parameters * found.width * (6.2832**0.5))
        axis.set_ylim(single / 20, 3 * float(found.high.max()))
    else:
        axis.set_yticks([])
    for label, pairs, color in (("largest", block.largest, LARGEST), ("smallest", block.smallest, SMALLEST)):
        if not pairs:
            continue
        axis.plot(
            [pair.value for pair in pairs],
            [0.03] * len(pairs),
            "|",
            color=color,
            markersize=10,
            transform=axis.get_xaxis_transform(),
            label=f"{len(pairs)} {label}",
        )
    axis.axvline(0, color="black", linewidth=0.6, zorder=0)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
