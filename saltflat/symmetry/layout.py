"""Where everything goes in the picture of a network's rescalings: rows for layers, columns for bars."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from saltflat.report.text import make_printable
from saltflat.symmetry.blocks import FIXED, OPPOSITE, LayerSummary, ScaleBlock, SymmetrySummary
from saltflat.symmetry.words import format_count, format_names, format_operation

if TYPE_CHECKING:
    from saltflat.symmetry.watch import Obstacle

MOST_ROWS = 150
LONGEST_NAME = 30

Path = tuple[str, ...]


@dataclass(frozen=True)
class PictureRow:
    """A line of the picture: a layer, several that cannot move, or an operation that holds scales in place."""

    label: str
    detail: str = ""
    layer: LayerSummary | None = None
    obstacle: bool = False
    unknown: bool = False


@dataclass(frozen=True)
class PictureBar:
    """A block and its place."""

    block: ScaleBlock
    first: int
    last: int
    column: int = 0

    @property
    def text(self) -> str:
        more = len(self.block.layers) - 1
        name = _shorten_name(self.block.name) + (f" + {more} more" if more > 0 and self.block.kind != OPPOSITE else "")
        return f"{name}\n{format_count(self.block.scales, 'scale')}"


def make_picture_rows(found: SymmetrySummary) -> list[PictureRow]:
    """Layers in the order of the model, operations that hold scales in place near where they are."""
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
            told = f"holds {format_count(each.pinned, 'scale')}" if each.known else "has no rule"
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
    """Where operations belong among layers. All names are looked at once, as there may be many of both."""

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
        """Before which layer to name it. Of modules without parameters, only that among numbered ones is known."""
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
    """Where each block's bar goes: streams to the left, others to the right of them wherever there is room."""
    seen: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row.layer is not None:
            for block in {*row.layer.tails, *row.layer.heads, *row.layer.statistics} - {FIXED}:
                seen.setdefault(block, []).append(number)
    # A bar that only one layer knows is made long enough for its name.
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
    # What leads nowhere goes outwards, so that no other line has to pass it.
    return not _is_stream(bar), bar.first, not bar.block.outgoing


def _shorten_name(name: str) -> str:
    """The end of a long name, which tells layers apart."""
    name = make_printable(name)
    return name if len(name) <= LONGEST_NAME else "..." + name[3 - LONGEST_NAME :]
