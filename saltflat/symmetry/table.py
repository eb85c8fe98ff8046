"""The rescalings of a network as a table: a row for every block of scales, and below it what is fixed, and by what."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from saltflat.report.page import framed, paragraph
from saltflat.report.page import table as html_table
from saltflat.report.table import add_numbers, fits, ruled
from saltflat.report.text import printable
from saltflat.symmetry.blocks import Block, layers_of
from saltflat.symmetry.summary import summary
from saltflat.symmetry.words import few, fixed_told, headline, held_told, notes

if TYPE_CHECKING:
    from saltflat.symmetry.group import Symmetries

# More rows than this are not read but scrolled past: similar ones are then folded into one, and the smallest left out.
MOST_ROWS = 30
HEADER = ("units of", "scales", "incoming", "outgoing", "")
# What shares a row where there are too many: names that differ in a number of their own, as "layer1.0" and "layer1.1",
# and if that is not enough, in any number.
FOLDS = (r"(?<!\w)(\d+)(?!\w)", r"(\d+)")

Row = tuple[str, ...]


class Tabled:
    """The group as rich renders it: with all columns where they fit, else with fewer, else as lines."""

    def __init__(self, group: Symmetries) -> None:
        self.summary = summary(group)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(headline(self.summary), style="bold")
        rows, left_out = rows_of(self.summary.blocks)
        if rows:
            yield Text("")
            tables = [_table(rows, columns) for columns in ((0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 1, 4))]
            fitting = [table for table in tables if fits(table, console, options)]
            yield fitting[0] if fitting else Text("\n".join(map(_line, rows)))
        if left_out:
            yield Text(left_out)
        yield Text("")
        for line in fixed_told(self.summary):
            yield Text(line)
        for line in held_told(self.summary):
            yield Padding(Text(line), (0, 0, 0, 2))


def page_of(group: Symmetries) -> str:
    """The same as a piece of HTML."""
    found = summary(group)
    rows, left_out = rows_of(found.blocks)
    parts = [paragraph(headline(found)), *([html_table(HEADER, rows, [""] * len(rows))] if rows else [])]
    return framed([*parts, *map(paragraph, filter(None, [left_out, *fixed_told(found), *held_told(found)]))])


def rows_of(blocks: Sequence[Block]) -> tuple[list[Row], str]:
    """A row per block; if there are many, those that differ only in numbers share a row. And what was left out."""
    rows = [_row(block) for block in blocks]
    sizes = [block.scales for block in blocks]
    for numbers in FOLDS:
        if len(rows) > MOST_ROWS:
            # Only what is alike in all but names: the numbers of scales and of tied layers stay as they are.
            rows, groups = folded([_row(block) for block in blocks], [_shape(block) for block in blocks], numbers)
            rows = [
                (row[0], f"{len(group)} x {row[1]}" if len(group) > 1 else row[1], *row[2:])
                for row, group in zip(rows, groups, strict=True)
            ]
            sizes = [sum(blocks[number].scales for number in group) for group in groups]
    if len(rows) <= MOST_ROWS:
        return rows, ""
    largest = sorted(range(len(rows)), key=lambda number: -sizes[number])[:MOST_ROWS]
    return [rows[number] for number in sorted(largest)], (
        f"... and {len(rows) - MOST_ROWS} more rows with fewer scales: "
        "saltflat.symmetry.summary.summary(group).blocks has all."
    )


def folded(rows: Sequence[Row], keys: Sequence[Hashable], numbers: str) -> tuple[list[Row], list[list[int]]]:
    """Rows of one key that differ only in numbers as one, with stars in their place; and which rows it stands for.

    Example:
        >>> rows = [("layer1.0.conv2", "bn2"), ("layer1.1.conv2", "bn2"), ("layer2.0.conv2", "bn2")]
        >>> folded(rows, [16, 16, 32], FOLDS[0])
        ([('layer1.*.conv2', 'bn2'), ('layer2.0.conv2', 'bn2')], [[0, 1], [2]])
    """
    alike: dict[Hashable, list[int]] = {}
    for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
        alike.setdefault((key, *(re.sub(numbers, "*", cell) for cell in row)), []).append(number)
    found = []
    for several in alike.values():
        columns = zip(*(rows[number] for number in several), strict=True)
        found.append(tuple(_starred(cells, numbers) for cells in columns))
    return found, list(alike.values())


def _starred(texts: Sequence[str], numbers: str) -> str:
    parts = zip(*(re.split(numbers, text) for text in texts), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _shape(block: Block) -> Hashable:
    return block.scales, len(block.layers), len(layers_of(block.outgoing)), len(block.absorbed_by), block.kind


def _row(block: Block) -> Row:
    layers = {*block.layers}
    parameters = dict.fromkeys(
        f".{name.rpartition('.')[2]}" for name in (*block.incoming, *block.opposite) if name not in layers
    )
    cells = block.name, str(block.scales), ", ".join(parameters), few(layers_of(block.outgoing), 1), notes(block)
    return tuple(map(printable, cells))


def _table(rows: Sequence[Row], columns: Sequence[int]) -> Table:
    table = ruled(HEADER[0])
    for column in columns[1:]:
        if column == 1:
            add_numbers(table, HEADER[1])
        else:
            table.add_column(HEADER[column], overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    return table


def _line(row: Row) -> str:
    return f"{row[0]}: {row[1]}" + f" ({row[4]})" * bool(row[4])
