"""Draw the rescalings of a network."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from textwrap import fill
from typing import TYPE_CHECKING, Any

from saltflat.errors import import_optional
from saltflat.render.symmetry import format_headline, format_names, format_operation
from saltflat.render.symmetry_blocks import (
    ABSORBED,
    FIXED,
    FREE,
    OPPOSITE,
    TIED,
    LayerSummary,
    ScaleBlock,
    SymmetrySummary,
    summarize_symmetries,
)
from saltflat.results.text import format_count, make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saltflat.symmetry.group import Symmetries
    from saltflat.symmetry.tracing.trace import Obstacle


MOST_ROWS = 150
LONGEST_NAME = 30

Path = tuple[str, ...]


@dataclass(frozen=True)
class PictureRow:
    """A row of the picture: a layer, several that cannot move, or an operation that fixes scales."""

    label: str
    detail: str = ""
    layer: LayerSummary | None = None
    obstacle: bool = False
    unknown: bool = False


@dataclass(frozen=True)
class PictureBar:
    """A block and its position."""

    block: ScaleBlock
    first: int
    last: int
    column: int = 0

    @property
    def text(self) -> str:
        """The label of the bar."""
        more = len(self.block.layers) - 1
        name = _shorten_name(self.block.name) + (f" + {more} more" if more > 0 and self.block.kind != OPPOSITE else "")
        return f"{name}\n{format_count(self.block.scales, 'scale')}"


def make_picture_rows(found: SymmetrySummary) -> list[PictureRow]:
    """Return a row per layer, in the order of the model, with the operations that fix scales between them."""
    places: dict[int, list[Obstacle]] = {}
    names = [layer.name for layer in found.layers]
    order = _RowOrder(names)
    for obstacle in found.obstacles:
        places.setdefault(order.find_row(obstacle), []).append(obstacle)
    rows: list[PictureRow] = []
    still: list[str] = []

    def flush_fixed_layers() -> None:
        if still:
            rows.append(PictureRow(format_names(map(_shorten_name, still), 1), "cannot move"))
            still.clear()

    for number in range(len(names) + 1):
        for each in places.get(number, []):
            flush_fixed_layers()
            where = f" in {_shorten_name(each.where)}" if each.where else ""
            told = f"fixes {format_count(each.pinned, 'scale')}" if each.known else "has no rule"
            rows.append(PictureRow(f"{format_operation(each)}{where}", told, obstacle=True, unknown=not each.known))
        if number < len(names):
            layer = found.layers[number]
            if layer.is_fixed:
                still.append(layer.name)
                continue
            flush_fixed_layers()
            detail = ", ".join(layer.parameters) if layer.parameters != (layer.name,) else ""
            rows.append(PictureRow(_shorten_name(layer.name), _shorten_name(detail), layer))
    flush_fixed_layers()
    if len(rows) > MOST_ROWS:
        left = len(rows) - MOST_ROWS
        rows = [*rows[:MOST_ROWS], PictureRow(f"... and {format_count(left, 'row')} more", "print(group) has all")]
    return rows


class _RowOrder:
    """The positions of operations among layers, computed once for all names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.where = {name: number for number, name in enumerate(names)}
        self.last: dict[Path, int] = {}  # by how names begin
        numbered: dict[Path, dict[int, int]] = {}
        for number, name in enumerate(names):
            path = tuple(name.split("."))
            for deep, part in enumerate(path):
                self.last[path[:deep]] = number
                if part.isdigit():
                    numbered.setdefault(path[:deep], {}).setdefault(int(part), number)
            self.last[path] = number
        # By how names begin, what numbers come next; and for each the first place of it or a higher one.
        self.next: dict[Path, tuple[list[int], list[int]]] = {}
        for begin, firsts in numbered.items():
            parts = sorted(firsts)
            lowest = list(accumulate((firsts[part] for part in reversed(parts)), min))
            self.next[begin] = parts, lowest[::-1]

    def find_row(self, obstacle: Obstacle) -> int:
        """Return the layer before which to show an operation."""
        path = tuple(obstacle.where.split(".")) if obstacle.where else ()
        if obstacle.where in self.where and "norm" in obstacle.operation:
            return self.where[obstacle.where]
        if path in self.last:
            return self.last[path] + 1
        higher = []
        for deep, part in enumerate(path):
            if part.isdigit() and path[:deep] in self.next:
                parts, lowest = self.next[path[:deep]]
                higher += lowest[(at := bisect_right(parts, int(part))) : at + 1]
        return min(higher) if higher else self.last.get(path[:1], len(self.where) - 1) + 1


def place_bars(blocks: Sequence[ScaleBlock], rows: Sequence[PictureRow]) -> dict[int, PictureBar]:
    """Return the position of each block's bar: streams to the left, others to the right where there is room."""
    seen: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row.layer is not None:
            for block in {*row.layer.tails, *row.layer.heads, *row.layer.statistics} - {FIXED}:
                seen.setdefault(block, []).append(number)
    # The bar of a single layer is made long enough for its name.
    bars = {each: PictureBar(blocks[each], where[0], max(where[-1], where[0] + 1)) for each, where in seen.items()}
    placed: dict[int, PictureBar] = {}
    for number, bar in sorted(bars.items(), key=lambda item: _get_priority(item[1])):
        beside = [other for other in placed.values() if bar.first <= other.last and other.first <= bar.last]
        column = 1 + max((other.column for other in beside if _is_stream(other) and not _is_stream(bar)), default=0)
        while any(other.column == column for other in beside):
            column += 1
        placed[number] = replace(bar, column=column)
    return placed


def _is_stream(bar: PictureBar) -> bool:
    return len(bar.block.layers) > 1


def _get_priority(bar: PictureBar) -> tuple[bool, int, bool]:
    # What leads nowhere goes outward, so that no other line has to cross it.
    return not _is_stream(bar), bar.first, not bar.block.outgoing


def _shorten_name(name: str) -> str:
    """Return the end of a long name, which distinguishes layers."""
    name = make_printable(name)
    return name if len(name) <= LONGEST_NAME else "..." + name[3 - LONGEST_NAME :]


# Face and edge. Distinguishable without colors, too: by the style of the edge.
COLORS = {FREE: ("#d6e8f5", "#0072b2"), TIED: ("#fbe3c8", "#d55e00"), OPPOSITE: ("#ecdcf0", "#8a4fa0")}
COLORS[ABSORBED] = ("#ffffff", "#8a8a8a")
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


def plot_symmetries(group: Symmetries) -> Figure:
    """Return a Figure, made without pyplot, so that there is no window and nothing to close."""
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
    figure: Figure = import_optional("matplotlib.figure", "plot()").Figure(figsize=(total, height))
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
    style: dict[str, Any] = {"fontsize": SMALL, "frameon": False, "borderaxespad": 0.8, "columnspacing": 1.5}
    figure.legend(handles=handles, loc="lower left", ncols=across, **style)
    return figure


class _SymmetryDrawing:
    """An axis in inches, with the positions of rows and columns."""

    def __init__(self, axis: Axes, top: float, spans: Sequence[Span]) -> None:
        self.axis, self.top, self.spans = axis, top, spans

    def get_y(self, row: float) -> float:
        """Return the height of a row."""
        return self.top + ROW * row

    def draw_box(self, column: int, first: float, last: float, **style: Any) -> None:
        """Draw a box over some rows of a column."""
        left, right = self.spans[column]
        patch = import_optional("matplotlib.patches", "plot()").FancyBboxPatch
        corner = (left, self.get_y(first - 0.32))
        shape = "round,pad=0,rounding_size=0.06"
        self.axis.add_patch(patch(corner, right - left, ROW * (last - first + 0.64), boxstyle=shape, **style))

    def draw_fixed_column(self, rows: int) -> None:
        """Draw the column of what is fixed."""
        self.draw_box(0, 0, rows - 1, facecolor=GROUND, edgecolor="none", zorder=2)
        place = sum(self.spans[0]) / 2, self.get_y(0.5)
        self.axis.text(*place, "fixed", fontsize=SMALLER, ha="center", va="center", color=INK, zorder=4)

    def draw_bar(self, bar: PictureBar) -> None:
        """Draw the bar of a block with its label."""
        face, edge = COLORS[bar.block.kind]
        style: dict[str, Any] = {
            "facecolor": face,
            "edgecolor": edge,
            "linestyle": LINES[bar.block.kind],
            "linewidth": 1.2,
        }
        self.draw_box(bar.column, bar.first, bar.last, zorder=2, **style)
        left, right = self.spans[bar.column]
        place = (left + right) / 2, self.get_y(bar.first + 0.5)
        text: dict[str, Any] = {
            "fontsize": SMALL,
            "ha": "center",
            "va": "center",
            "color": INK,
            "linespacing": 1.1,
            "zorder": 4,
        }
        self.axis.text(*place, bar.text, parse_math=False, **text)

    def draw_label(self, number: int, row: PictureRow, left: float, second: float) -> None:
        """Draw the label and the detail of a row."""
        color = WRONG if row.obstacle else INK if row.layer else FAINT
        weight = "bold" if row.unknown else "normal"
        style: dict[str, Any] = {"va": "center", "parse_math": False, "fontweight": weight}
        if number % 2:
            self.axis.axhspan(self.get_y(number - 0.5), self.get_y(number + 0.5), color=BAND, linewidth=0, zorder=0)
        self.axis.text(left, self.get_y(number), row.label, fontsize=SMALL, color=color, **style)
        detail = WRONG if row.obstacle else FAINT
        self.axis.text(second, self.get_y(number), row.detail, fontsize=SMALLER, color=detail, **style)
        if row.obstacle:
            middle = sum(self.spans[0]) / 2
            self.axis.plot([middle], [self.get_y(number)], "X", color=WRONG, markersize=7, markeredgewidth=0, zorder=5)

    def draw_layer(self, number: int, layer: LayerSummary, bars: dict[int, PictureBar]) -> None:
        """Draw a line from dots to arrows, dashed through a BatchNorm, which no scale passes."""
        passed = [each for each in layer.statistics if each != FIXED]
        tails = [self._get_span(each, bars) for each in passed or layer.tails]
        # The output of a BatchNorm without parameters has a fixed size.
        heads = [self._get_span(each, bars) for each in layer.heads or (FIXED,)]
        y, color = self.get_y(number), FAINT if passed else INK
        starts, ends = zip(*tails, *heads, strict=True)
        if max(starts) > min(ends):
            style: dict[str, Any] = {
                "color": color,
                "linewidth": 1.0,
                "linestyle": (0, (3, 2)) if passed else "-",
                "zorder": 1,
            }
            self.axis.plot([min(ends), max(starts)], [y, y], **style)
        dots = [(edge, y) for tail in tails for edge in _find_facing_edges(tail, heads)]
        rights = [edge + 0.035 for head in heads for edge in _find_facing_edges(head, tails) if edge == head[1]]
        lefts = [edge - 0.035 for head in heads for edge in _find_facing_edges(head, tails) if edge == head[0]]
        for _, right in set(tails) & set(heads):
            # From a block to itself: a small loop beside it.
            outside = right + 0.12
            loop: dict[str, Any] = {"color": color, "linewidth": 1.0, "zorder": 4}
            self.axis.plot([right, outside, outside, right], [y - 0.07, y - 0.07, y + 0.07, y + 0.07], **loop)
            dots.append((right, y - 0.07))
            self._draw_markers([(right + 0.035, y + 0.07)], "<", color, 5.5)
        self._draw_markers(dots, "o", color, 4)
        self._draw_markers([(tip, y) for tip in rights], "<", color, 5.5)
        self._draw_markers([(tip, y) for tip in lefts], ">", color, 5.5)

    def _draw_markers(self, places: Sequence[tuple[float, float]], shape: str, color: str, size: float) -> None:
        for x, y in places:
            self.axis.plot([x], [y], shape, color=color, markersize=size, markeredgewidth=0, zorder=5)

    def _get_span(self, block: int, bars: dict[int, PictureBar]) -> Span:
        return self.spans[0 if block == FIXED else bars[block].column]


def _find_facing_edges(mine: Span, others: Sequence[Span]) -> list[float]:
    """Return the sides of a bar on which other bars lie."""
    left = [mine[0]] if any(other[1] <= mine[0] for other in others) else []
    return left + ([mine[1]] if any(other[0] >= mine[1] for other in others) else [])


def _make_legend_handles(found: SymmetrySummary, rows: Sequence[PictureRow], bars: dict[int, PictureBar]) -> list[Any]:
    """Return the entries of the legend, only for what occurs."""
    patches, lines = import_optional("matplotlib.patches", "plot()"), import_optional("matplotlib.lines", "plot()")
    handles = [patches.Patch(facecolor=GROUND, label="fixed: inputs, outputs, constants")]
    kinds = {bar.block.kind for bar in bars.values()}
    for kind, meaning in MEANING.items():
        if kind in kinds:
            face, edge = COLORS[kind]
            handles.append(patches.Patch(facecolor=face, edgecolor=edge, linestyle=LINES[kind], label=meaning))
    if bars:
        handles.append(lines.Line2D([], [], color=INK, marker="o", markersize=4, label="a layer, from dots to arrows"))
    if any(layer.statistics for layer in found.layers):
        handles.append(lines.Line2D([], [], color=FAINT, linestyle="--", label="a BatchNorm, which no scale passes"))
    if any(row.obstacle for row in rows):
        cross = {"linestyle": "none", "marker": "X", "color": WRONG, "markersize": 7, "markeredgewidth": 0}
        handles.append(lines.Line2D([], [], label="fixes scales", **cross))
    return handles


def _compute_text_width(texts: Iterable[str]) -> float:
    return LETTER * max((len(line) for text in texts for line in text.split("\n")), default=0) + 0.12
