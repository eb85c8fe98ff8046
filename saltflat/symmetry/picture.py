"""The rescalings of a network as a picture, from its input at the top to its output at the bottom.

Every block of scales is a bar. Every layer has a row of its own: a line from the bars it comes from to those it leads
to. A bar reaches from the first layer that has to do with it to the last, so a residual stream is a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from saltflat.report.optional import import_optional
from saltflat.report.text import make_printable
from saltflat.symmetry.blocks import ABSORBED, FIXED, FREE, OPPOSITE, TIED, LayerSummary, SymmetrySummary
from saltflat.symmetry.layout import PictureBar, PictureRow, make_picture_rows, place_bars
from saltflat.symmetry.summary import summarize_symmetries
from saltflat.symmetry.words import format_headline

if TYPE_CHECKING:
    from saltflat.symmetry.group import Symmetries

# Face and edge. Told apart without colours, too: by the style of the edge.
COLOURS = {FREE: ("#d6e8f5", "#0072b2"), TIED: ("#fbe3c8", "#d55e00"), OPPOSITE: ("#ecdcf0", "#8a4fa0")}
COLOURS[ABSORBED] = ("#ffffff", "#8a8a8a")
LINES = {FREE: "-", TIED: "-", OPPOSITE: "-.", ABSORBED: "--"}
MEANING = {
    FREE: "free",
    TIED: "free, and shared by several layers",
    OPPOSITE: "free, and opposite in two places",
    ABSORBED: "free, and absorbed by BatchNorm",
}
GROUND, FAINT, INK, WRONG, BAND = "#c8c8c8", "#8a8a8a", "#222222", "#b00020", "#f6f6f6"

# In inches.
ROW, GAP, EDGE = 0.36, 0.45, 0.25
LETTER = 0.056  # of the small size
SMALL, SMALLER = 7.5, 6.5

Span = tuple[float, float]  # left and right


def plot_symmetries(group: Symmetries) -> Any:
    """A Figure, made without pyplot: there is no window, no current figure, and nothing to close."""
    found = summarize_symmetries(group)
    rows = make_picture_rows(found)
    bars = place_bars(found.blocks, rows)
    columns = max((bar.column for bar in bars.values()), default=0)
    texts = [[bar.text for bar in bars.values() if bar.column == column] for column in range(1, columns + 1)]
    # From left to right: names of rows, what they hold, what is fixed, and the columns of bars.
    widths = [_compute_text_width(row.label for row in rows), _compute_text_width(row.detail for row in rows), 0.35]
    widths += [max(_compute_text_width(each), 0.6) for each in texts]
    gaps = [EDGE, 0.1, 0.15, *[GAP] * len(texts)]
    starts = [sum(widths[:number]) + sum(gaps[: number + 1]) for number in range(len(widths))]
    total = max(starts[-1] + widths[-1] + 2 * EDGE, 6.0)
    title = fill(make_printable(format_headline(found)), int((total - 2 * EDGE) / 0.083))
    handles, across = _make_legend_handles(found, rows, bars), max(int(total / 2.9), 2)
    top, bottom = 0.35 + 0.2 * (1 + title.count("\n")), 0.25 + 0.17 * -(-len(handles) // across)
    deep = max(len(rows), 2, *(bar.last + 1 for bar in bars.values()))
    height = top + ROW * deep + bottom
    figure = import_optional("matplotlib.figure", "plot()").Figure(figsize=(total, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, total), ylim=(height, 0))
    axis.set_axis_off()
    axis.text(EDGE, EDGE, title, fontsize=10, va="top", color=INK, parse_math=False)
    spans = [(start, start + width) for start, width in zip(starts, widths, strict=True)][2:]
    draw = _SymmetryDrawing(axis, top + ROW / 2, spans)
    draw.draw_fixed_column(deep)
    for number, row in enumerate(rows):
        draw.draw_label(number, row, starts[0], starts[1])
        if row.layer is not None:
            draw.draw_layer(number, row.layer, bars)
    for bar in bars.values():
        draw.draw_bar(bar)
    style = {"fontsize": SMALL, "frameon": False, "borderaxespad": 0.8, "columnspacing": 1.5}
    figure.legend(handles=handles, loc="lower left", ncols=across, **style)
    return figure


class _SymmetryDrawing:
    """An axis in inches, and where rows and columns are on it."""

    def __init__(self, axis: Any, top: float, spans: Sequence[Span]) -> None:
        self.axis, self.top, self.spans = axis, top, spans

    def get_y(self, row: float) -> float:
        return self.top + ROW * row

    def draw_box(self, column: int, first: float, last: float, **style: Any) -> None:
        left, right = self.spans[column]
        patch = import_optional("matplotlib.patches", "plot()").FancyBboxPatch
        corner = (left, self.get_y(first - 0.32))
        shape = "round,pad=0,rounding_size=0.06"
        self.axis.add_patch(patch(corner, right - left, ROW * (last - first + 0.64), boxstyle=shape, **style))

    def draw_fixed_column(self, rows: int) -> None:
        self.draw_box(0, 0, rows - 1, facecolor=GROUND, edgecolor="none", zorder=2)
        place = sum(self.spans[0]) / 2, self.get_y(0.5)
        self.axis.text(*place, "fixed", fontsize=SMALLER, ha="center", va="center", color=INK, zorder=4)

    def draw_bar(self, bar: PictureBar) -> None:
        face, edge = COLOURS[bar.block.kind]
        style = {"facecolor": face, "edgecolor": edge, "linestyle": LINES[bar.block.kind], "linewidth": 1.2}
        self.draw_box(bar.column, bar.first, bar.last, zorder=2, **style)
        left, right = self.spans[bar.column]
        place = (left + right) / 2, self.get_y(bar.first + 0.5)
        text = {"fontsize": SMALL, "ha": "center", "va": "center", "color": INK, "linespacing": 1.1, "zorder": 4}
        self.axis.text(*place, bar.text, parse_math=False, **text)

    def draw_label(self, number: int, row: PictureRow, left: float, second: float) -> None:
        colour = WRONG if row.obstacle else INK if row.layer else FAINT
        weight = "bold" if row.unknown else "normal"
        style = {"va": "center", "parse_math": False, "fontweight": weight}
        if number % 2:
            self.axis.axhspan(self.get_y(number - 0.5), self.get_y(number + 0.5), color=BAND, linewidth=0, zorder=0)
        self.axis.text(left, self.get_y(number), row.label, fontsize=SMALL, color=colour, **style)
        detail = WRONG if row.obstacle else FAINT
        self.axis.text(second, self.get_y(number), row.detail, fontsize=SMALLER, color=detail, **style)
        if row.obstacle:
            middle = sum(self.spans[0]) / 2
            self.axis.plot([middle], [self.get_y(number)], "X", color=WRONG, markersize=7, markeredgewidth=0, zorder=5)

    def draw_layer(self, number: int, layer: LayerSummary, bars: dict[int, PictureBar]) -> None:
        """A line from dots to arrows; dashed through a BatchNorm, which lets no scale pass."""
        passed = [each for each in layer.statistics if each != FIXED]
        tails = [self._get_span(each, bars) for each in passed or layer.tails]
        # What a BatchNorm without parameters gives has a size of its own.
        heads = [self._get_span(each, bars) for each in layer.heads or (FIXED,)]
        y, colour = self.get_y(number), FAINT if passed else INK
        starts, ends = zip(*tails, *heads, strict=True)
        if max(starts) > min(ends):
            style = {"color": colour, "linewidth": 1.0, "linestyle": (0, (3, 2)) if passed else "-", "zorder": 1}
            self.axis.plot([min(ends), max(starts)], [y, y], **style)
        dots = [(edge, y) for tail in tails for edge in _find_facing_edges(tail, heads)]
        rights = [edge + 0.035 for head in heads for edge in _find_facing_edges(head, tails) if edge == head[1]]
        lefts = [edge - 0.035 for head in heads for edge in _find_facing_edges(head, tails) if edge == head[0]]
        for _, right in set(tails) & set(heads):
            # From a block to itself: a small loop beside it.
            outside = right + 0.12
            style = {"color": colour, "linewidth": 1.0, "zorder": 4}
            self.axis.plot([right, outside, outside, right], [y - 0.07, y - 0.07, y + 0.07, y + 0.07], **style)
            dots.append((right, y - 0.07))
            self._draw_markers([(right + 0.035, y + 0.07)], "<", colour, 5.5)
        self._draw_markers(dots, "o", colour, 4)
        self._draw_markers([(tip, y) for tip in rights], "<", colour, 5.5)
        self._draw_markers([(tip, y) for tip in lefts], ">", colour, 5.5)

    def _draw_markers(self, places: Sequence[tuple[float, float]], shape: str, colour: str, size: float) -> None:
        for x, y in places:
            self.axis.plot([x], [y], shape, color=colour, markersize=size, markeredgewidth=0, zorder=5)

    def _get_span(self, block: int, bars: dict[int, PictureBar]) -> Span:
        return self.spans[0 if block == FIXED else bars[block].column]


def _find_facing_edges(mine: Span, others: Sequence[Span]) -> list[float]:
    """The sides of a bar on which other bars lie."""
    left = [mine[0]] if any(other[1] <= mine[0] for other in others) else []
    return left + ([mine[1]] if any(other[0] >= mine[1] for other in others) else [])


def _make_legend_handles(found: SymmetrySummary, rows: Sequence[PictureRow], bars: dict[int, PictureBar]) -> list[Any]:
    """What stands in the legend: only what occurs."""
    patches, lines = import_optional("matplotlib.patches", "plot()"), import_optional("matplotlib.lines", "plot()")
    handles = [patches.Patch(facecolor=GROUND, label="fixed: inputs, outputs, constants")]
    kinds = {bar.block.kind for bar in bars.values()}
    for kind, meaning in MEANING.items():
        if kind in kinds:
            face, edge = COLOURS[kind]
            handles.append(patches.Patch(facecolor=face, edgecolor=edge, linestyle=LINES[kind], label=meaning))
    if bars:
        handles.append(lines.Line2D([], [], color=INK, marker="o", markersize=4, label="a layer, from dots to arrows"))
    if any(layer.statistics for layer in found.layers):
        handles.append(lines.Line2D([], [], color=FAINT, linestyle="--", label="a BatchNorm, which no scale passes"))
    if any(row.obstacle for row in rows):
        cross = {"linestyle": "none", "marker": "X", "color": WRONG, "markersize": 7, "markeredgewidth": 0}
        handles.append(lines.Line2D([], [], label="holds scales in place", **cross))
    return handles


def _compute_text_width(texts: Iterable[str]) -> float:
    return LETTER * max((len(line) for text in texts for line in text.split("\n")), default=0) + 0.12
