"""The rescalings of a network as a table: a row for every block of scales, and below it what is fixed, and by what."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from saltflat.report.page import render_html_table as html_table
from saltflat.report.page import render_paragraph, wrap_html
from saltflat.report.table import add_number_column, build_ruled_table, can_fit
from saltflat.report.text import make_printable
from saltflat.symmetry.blocks import ScaleBlock, get_layer_names
from saltflat.symmetry.summary import summarize_symmetries
from saltflat.symmetry.words import (
    format_block_notes,
    format_fixed_lines,
    format_headline,
    format_names,
    format_obstacles,
)

if TYPE_CHECKING:
    from saltflat.symmetry.group import Symmetries

# More rows than this are not read but scrolled past: similar ones are then folded into one, and the smallest left out.
MOST_ROWS = 30
HEADER = ("units of", "scales", "incoming", "outgoing", "")
# What shares a row where there are too many: names that differ in a number of their own, as "layer1.0" and "layer1.1",
# and if that is not enough, in any number.
FOLDS = (r"(?<!\w)(\d+)(?!\w)", r"(\d+)")

Row = tuple[str, ...]


class SymmetriesRenderable:
    """The group as rich renders it: with all columns where they fit, else with fewer, else as lines."""

    def __init__(self, group: Symmetries) -> None:
        self.summary = summarize_symmetries(group)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(format_headline(self.summary), style="bold")
        rows, left_out = make_table_rows(self.summary.blocks)
        if rows:
            yield Text("")
            tables = [_build_table(rows, columns) for columns in ((0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 1, 4))]
            fitting = [table for table in tables if can_fit(table, console, options)]
            yield fitting[0] if fitting else Text("\n".join(map(_format_row_line, rows)))
        if left_out:
            yield Text(left_out)
        yield Text("")
        for line in format_fixed_lines(self.summary):
            yield Text(line)
        for line in format_obstacles(self.summary):
            yield Padding(Text(line), (0, 0, 0, 2))


def format_symmetries_html(group: Symmetries) -> str:
    """The same as a piece of HTML."""
    found = summarize_symmetries(group)
    rows, left_out = make_table_rows(found.blocks)
    parts = [render_paragraph(format_headline(found)), *([html_table(HEADER, rows, [""] * len(rows))] if rows else [])]
    return wrap_html(
        [*parts, *map(render_paragraph, filter(None, [left_out, *format_fixed_lines(found), *format_obstacles(found)]))]
    )


def make_table_rows(blocks: Sequence[ScaleBlock]) -> tuple[list[Row], str]:
    """A row per block; if there are many, those that differ only in numbers share a row. And what was left out."""
    rows = [_make_table_row(block) for block in blocks]
    sizes = [block.scales for block in blocks]
    for numbers in FOLDS:
        if len(rows) > MOST_ROWS:
            # Only what is alike in all but names: the numbers of scales and of tied layers stay as they are.
            rows, groups = merge_similar_rows(
                [_make_table_row(block) for block in blocks], [_get_merge_key(block) for block in blocks], numbers
            )
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


def merge_similar_rows(
    rows: Sequence[Row], keys: Sequence[Hashable], numbers: str
) -> tuple[list[Row], list[list[int]]]:
    """Rows of one key that differ only in numbers as one, with stars in their place; and which rows it stands for.

    Example:
        >>> rows = [("layer1.0.conv2", "bn2"), ("layer1.1.conv2", "bn2"), ("layer2.0.conv2", "bn2")]
        >>> merge_similar_rows(rows, [16, 16, 32], FOLDS[0])
        ([('layer1.*.conv2', 'bn2'), ('layer2.0.conv2', 'bn2')], [[0, 1], [2]])
    """
    alike: dict[Hashable, list[int]] = {}
    for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
        alike.setdefault((key, *(re.sub(numbers, "*", cell) for cell in row)), []).append(number)
    found = []
    for several in alike.values():
        columns = zip(*(rows[number] for number in several), strict=True)
        found.append(tuple(_star_differences(cells, numbers) for cells in columns))
    return found, list(alike.values())


def _star_differences(texts: Sequence[str], numbers: str) -> str:
    parts = zip(*(re.split(numbers, text) for text in texts), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _get_merge_key(block: ScaleBlock) -> Hashable:
    return block.scales, len(block.layers), len(get_layer_names(block.outgoing)), len(block.absorbed_by), block.kind


def _make_table_row(block: ScaleBlock) -> Row:
    layers = {*block.layers}
    parameters = dict.fromkeys(
        f".{name.rpartition('.')[2]}" for name in (*block.incoming, *block.opposite) if name not in layers
    )
    cells = (
        block.name,
        str(block.scales),
        ", ".join(parameters),
        format_names(get_layer_names(block.outgoing), 1),
        format_block_notes(block),
    )
    return tuple(map(make_printable, cells))


def _build_table(rows: Sequence[Row], columns: Sequence[int]) -> Table:
    table = build_ruled_table(HEADER[0])
    for column in columns[1:]:
        if column == 1:
            add_number_column(table, HEADER[1])
        else:
            table.add_column(HEADER[column], overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    return table


def _format_row_line(row: Row) -> str:
    return f"{row[0]}: {row[1]}" + f" ({row[4]})" * bool(row[4])
