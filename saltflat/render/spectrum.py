"""Render a spectrum in words and as a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.errors import import_optional
from saltflat.render.report import MOST_LAYERS, render_paragraph, wrap_html
from saltflat.render.report import render_html_table as html_table
from saltflat.results.text import add_number_column, build_ruled_table, format_number, format_quantity, make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saltflat.spectrum.result import Block, Spectrum


MATRIX = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton matrix"}
PAIRS = ("eigenvalue", "value", "error at most")
LAYERS = ("layer", "parameters", "largest", "second", "smallest", "trace")


class SpectrumRenderable:
    """Rich renderable of a spectrum."""

    def __init__(self, spectrum: Spectrum) -> None:
        self.spectrum = spectrum

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(make_printable(self.spectrum.model), style="bold")
        yield Text(" | ".join(format_spectrum_facts(self.spectrum)) + "\n")
        header, lines = make_spectrum_rows(self.spectrum)
        table = build_ruled_table(header[0])
        for column in header[1:]:
            add_number_column(table, column)
        for line in lines:
            table.add_row(*map(Text, line))
        yield table
        yield Text("")
        for said in format_spectrum_notes(self.spectrum):
            yield Text(said)


def format_spectrum_html(spectrum: Spectrum) -> str:
    """Return the spectrum as HTML."""
    header, lines = make_spectrum_rows(spectrum)
    parts = [
        render_paragraph(spectrum.model),
        render_paragraph(" | ".join(format_spectrum_facts(spectrum))),
        html_table(header, lines, [""] * len(lines)),
        *map(render_paragraph, format_spectrum_notes(spectrum)),
    ]
    return wrap_html(parts)


def format_spectrum_facts(spectrum: Spectrum) -> list[str]:
    """Return what was computed, and how, as the parts of a line."""
    settings = spectrum.settings
    said = [MATRIX.get(str(settings.get("matrix")), ""), f"{spectrum.examples} example{'s' * (spectrum.examples != 1)}"]
    said.append(f"loss {format_number(spectrum.loss)} ({settings.get('loss')})")
    said += [str(settings.get("dtype")), str(settings.get("device")), f"{format_number(spectrum.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def make_spectrum_rows(spectrum: Spectrum) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the header and a row for each eigenvalue of the network, or for each layer."""
    if len(spectrum) == 1:
        return PAIRS, _format_eigenvalues(spectrum.only_block)
    return LAYERS, [_format_layer(block) for block in select_largest_blocks(spectrum)]


def select_largest_blocks(spectrum: Spectrum, count: int = MOST_LAYERS) -> list[Block]:
    """Return the layers of the largest eigenvalues, in the order of the network."""
    sizes = sorted((max(map(abs, block.ends)) for block in spectrum.values()), reverse=True)
    least = sizes[min(count, len(sizes)) - 1]
    return [block for block in spectrum.values() if max(map(abs, block.ends)) >= least][:count]


def _format_eigenvalues(block: Block) -> list[list[str]]:
    named = [(f"largest {n}", pair) for n, pair in enumerate(block.largest, 1)]
    named += reversed([(f"smallest {n}", pair) for n, pair in enumerate(block.smallest, 1)])
    return [
        [name, format_number(pair.value, 6), f"{pair.bound:.1e}" + "!" * (not pair.converged)] for name, pair in named
    ]


def _format_layer(block: Block) -> list[str]:
    values = [format_number(pair.value) + "!" * (not pair.converged) for pair in block.largest[:2]]
    least = [format_number(pair.value) + "!" * (not pair.converged) for pair in block.smallest[:1]]
    trace = format_quantity(block.trace, block.trace_stderr) if block.has_density else ""
    return [make_printable(block.name), f"{block.parameters:,}", *(*values, "")[:2], *(least or [""]), trace]


def format_spectrum_notes(spectrum: Spectrum) -> list[str]:
    """Return lines on the trace and on what the errors cover, and the notes."""
    said = []
    if len(spectrum) == 1 and spectrum.only_block.has_density:
        said.append(f"Trace: {format_quantity(spectrum.trace, spectrum.trace_stderr)}.")
    if any("!" in cell for line in make_spectrum_rows(spectrum)[1] for cell in line):
        said.append("! did not converge")
    left = len(spectrum) - len(select_largest_blocks(spectrum))
    if left:
        said.append(f"... and {left} more layers with less curvature.")
    probes = max((len(block.nodes) for block in spectrum.values()), default=0)
    if probes:
        said.append(
            f"The errors of trace and density are over {probes} random probes: they cover the choice of the probes, "
            "not that of the examples."
        )
    return [make_printable(each) for each in (*said, *(f"Note: {note}" for note in spectrum.notes))]


# Distinguishable without colors, too (Okabe and Ito).
LINE, LARGEST, SMALLEST = "#0072b2", "#d55e00", "#009e73"
MOST = 12  # layers in one picture
ACROSS = 3


def plot_spectrum(spectrum: Spectrum, width: float | None = None) -> Figure:
    """Return a Figure, made without pyplot, so that there is no window and nothing to close."""
    blocks = select_largest_blocks(spectrum, MOST)
    across = min(ACROSS, len(blocks))
    down = -(-len(blocks) // across)
    size = (6.4, 4.2) if len(blocks) == 1 else (3.6 * across, 0.6 + 2.6 * down)
    figure: Figure = import_optional("matplotlib.figure", "plot()").Figure(figsize=size, layout="constrained")
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


def _draw_block(axis: Axes, block: Block, width: float | None) -> None:
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
        # Far below the density of a single eigenvalue there is nothing to see.
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
