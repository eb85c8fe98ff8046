"""Where everything goes in the picture of a network's rescalings: rows for layers, columns for bars."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from saltflat.report.text import printable
from saltflat.symmetry.blocks import FIXED, OPPOSITE, Block, Layer, Summary
from saltflat.symmetry.words import few, many, operation

if TYPE_CHECKING:
    from saltflat.symmetry.watch import Obstacle

MOST_ROWS = 150
LONGEST_NAME = 30

Path = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A line of the picture: a layer, several that cannot move, or an operation that holds scales in place."""

    label: str
    detail: str = ""
    layer: Layer | None = None
    obstacle: bool = False
    unknown: bool = False


@dataclass(frozen=True)
class Bar:
    """A block and its place."""

    block: Block
    first: int
    last: int
    column: int = 0

    @property
    def text(self) -> str:
        more = len(self.block.layers) - 1
        name = _short(self.block.name) + (f" + {more} more" if more > 0 and self.block.kind != OPPOSITE else "")
        return f"{name}\n{many(self.block.scales, 'scale')}"


def rows_of(found: Summary) -> list[Row]:
    """Layers in the order of the model, operations that hold scales in place near where they are."""
    places: dict[int, list[Obstacle]] = {}
    names = [layer.name for layer in found.layers]
    order = _Order(names)
    for obstacle in found.obstacles:
        places.setdefault(order.place(obstacle), []).append(obstacle)
    rows: list[Row] = []
    still: list[str] = []

    def settle() -> None:
        if still:
            rows.append(Row(few(map(_short, still), 1), "cannot move"))
            still.clear()

    for number in range(len(names) + 1):
        for each in places.get(number, []):
            settle()
            where = f" in {_short(each.where)}" if each.where else ""
            told = f"holds {many(each.pinned, 'scale')}" if each.known else "has no rule"
            rows.append(Row(f"{operation(each)}{where}", told, obstacle=True, unknown=not each.known))
        if number < len(names):
            layer = found.layers[number]
            if layer.fixed:
                still.append(layer.name)
                continue
            settle()
            detail = ", ".join(layer.parameters) if layer.parameters != (layer.name,) else ""
            rows.append(Row(_short(layer.name), _short(detail), layer))
    settle()
    if len(rows) > MOST_ROWS:
        left = len(rows) - MOST_ROWS
        rows = [*rows[:MOST_ROWS], Row(f"... and {many(left, 'row')} more", "print(group) has all")]
    return rows


class _Order:
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

    def place(self, obstacle: Obstacle) -> int:
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


def bars_of(blocks: Sequence[Block], rows: Sequence[Row]) -> dict[int, Bar]:
    """Where each block's bar goes: streams to the left, others to the right of them wherever there is room."""
    seen: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row.layer is not None:
            for block in {*row.layer.tails, *row.layer.heads, *row.layer.statistics} - {FIXED}:
                seen.setdefault(block, []).append(number)
    # A bar that only one layer knows is made long enough for its name.
    bars = {each: Bar(blocks[each], where[0], max(where[-1], where[0] + 1)) for each, where in seen.items()}
    placed: dict[int, Bar] = {}
    for number, bar in sorted(bars.items(), key=lambda item: _priority(item[1])):
        beside = [other for other in placed.values() if bar.first <= other.last and other.first <= bar.last]
        column = 1 + max((other.column for other in beside if _stream(other) and not _stream(bar)), default=0)
        while any(other.column == column for other in beside):
            column += 1
        placed[number] = replace(bar, column=column)
    return placed


def _stream(bar: Bar) -> bool:
    return len(bar.block.layers) > 1


def _priority(bar: Bar) -> tuple[bool, int, bool]:
    # What leads nowhere goes outwards, so that no other line has to pass it.
    return not _stream(bar), bar.first, not bar.block.outgoing


def _short(name: str) -> str:
    """The end of a long name, which tells layers apart."""
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else "..." + name[3 - LONGEST_NAME :]
