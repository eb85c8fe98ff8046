"""Render the rescalings of a network as a table."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from saltflat.render.report import render_html_table as html_table
from saltflat.render.report import render_paragraph, wrap_html
from saltflat.render.symmetry_blocks import ABSORBED, ScaleBlock, SymmetrySummary, get_layer_names, summarize_symmetries
from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    can_fit,
    format_count,
    join_words,
    make_printable,
)

if TYPE_CHECKING:
    from saltflat.symmetry.group import Symmetries
    from saltflat.symmetry.tracing.trace import Obstacle


MOST_NAMES = 6
MOST_OBSTACLES = 12


def format_headline(found: SymmetrySummary) -> str:
    """Return a sentence on how much can be rescaled."""
    if not found.entries:
        return "This model has no parameters: there is nothing to rescale."
    if not found.scales:
        why = (
            "the operations below fix everything between its inputs and outputs."
            if found.obstacles
            else "all its parameters connect inputs to outputs, without a unit in between."
        )
        return f"No rescaling{' by layers' * (found.kind == 'layer')} leaves this network's function unchanged: {why}"
    scales = format_count(found.scales, "independent scale")
    said = f"{scales}; {found.moving} of {found.entries} parameter entries can move"
    if found.kind == "layer":
        return f"{said}; every parameter has one factor."
    return f"{said}; {format_count(found.layer_scales, 'scale')} if every parameter has one factor."


def format_block_notes(block: ScaleBlock) -> str:
    """Return remarks on a block."""
    said = []
    larger, smaller = get_layer_names(block.incoming), get_layer_names(block.opposite)
    lower = {*smaller}
    others = [layer for layer in block.layers[1:] if layer not in lower]
    if others:
        said.append(f"tied with {format_names(others, 1)}")
    if smaller:
        said.append(f"opposite {'within' if larger == smaller else 'in'} {format_names(smaller, 1)}")
    if block.absorbed_by:
        names = format_names(block.absorbed_by, 1)
        said.append(f"absorbed by {names}" if block.kind == ABSORBED else f"statistics of {names} follow")
    elif not (block.outgoing or smaller):
        said.append("nothing shrinks in return")
    return "; ".join(said)


def format_fixed_lines(found: SymmetrySummary) -> list[str]:
    """Return lines on scales absorbed by BatchNorm and on parameters that cannot move."""
    lines = []
    absorbed = sum(block.scales for block in found.blocks if block.kind == ABSORBED)
    if absorbed:
        lines.append(
            f"{format_count(absorbed, 'scale')} absorbed by BatchNorm: the layer before it can have any size, as only "
            "running statistics follow. saltflat.fold(model) returns the network without BatchNorm."
        )
    if found.fixed and found.scales:
        lines.append(
            f"Cannot move: {format_count(len(found.fixed), 'parameter')} with "
            f"{format_count(sum(found.fixed.values()), 'entry', 'entries')}: "
            f"{format_names(list(found.fixed), MOST_NAMES)}."
        )
    lines += [f"For inputs whose masks decide as those of the example did: {line}" for line in found.assumed]
    return [make_printable(line) for line in [*lines, *(["Held in place by:"] if found.obstacles else [])]]


def format_obstacles(found: SymmetrySummary) -> list[str]:
    """Return lines on the operations that fix scales, unknown ones first, similar ones together."""
    alike: dict[tuple[bool, str, str, str], list[Obstacle]] = {}
    for each in sorted(found.obstacles, key=lambda each: each.known):
        where = re.sub(r"\d+", "*", each.where)
        alike.setdefault((each.known, each.operation, where, re.sub(r":\d+", ":*", each.line)), []).append(each)
    told = [format_obstacle(several) for several in alike.values()]
    left = len(told) - MOST_OBSTACLES
    return [
        make_printable(line)
        for line in [*told[:MOST_OBSTACLES], *([f"... and {left} more: group.obstacles has all."] if left > 0 else [])]
    ]


def format_obstacle(several: Sequence[Obstacle]) -> str:
    """Return a line on one operation, in one or several places."""
    first = several[0]
    where = f" in {format_names([each.where for each in several], 1)}" if first.where else ""
    line = f" ({first.line})" if first.line else ""
    pinned = sum(each.pinned for each in several)
    if first.known:
        return f"{format_operation(first)}{where}: {format_count(pinned, 'scale')}{line}"
    return f"UNKNOWN {first.operation}{where}: has no rule, so everything it touches counts as fixed{line}"


def format_operation(each: Obstacle) -> str:
    """Return the usual name of an operation.

    Example:
        >>> from saltflat.symmetry.tracing.trace import Obstacle
        >>> format_operation(Obstacle("aten.native_layer_norm", "ln", "", True, 4))
        'layer_norm'
    """
    return each.operation.removeprefix("aten.").removeprefix("native_").lstrip("_").removeprefix("safe_")


def format_names(names: Iterable[str], count: int) -> str:
    """Join names, only the first ``count`` if there are many.

    Example:
        >>> format_names(["conv1", "conv2", "conv3"], 1)
        'conv1 and 2 more'
    """
    names = list(names)
    if len(names) <= count + 1:
        return join_words(names)
    return f"{', '.join(names[:count])} and {len(names) - count} more"


# Nobody reads more rows than this: beyond, similar ones are merged, and the smallest left out.
MOST_ROWS = 30
HEADER = ("units of", "scales", "incoming", "outgoing", "")
# Names that share a row if there are too many: those that differ in a separate number, as "layer1.0" and "layer1.1",
# and if that is not enough, in any number.
FOLDS = (r"(?<!\w)(\d+)(?!\w)", r"(\d+)")

Row = tuple[str, ...]


class SymmetriesRenderable:
    """Rich renderable of a group: with all columns where they fit, else with fewer, else as lines."""

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
    """Return the group as HTML."""
    found = summarize_symmetries(group)
    rows, left_out = make_table_rows(found.blocks)
    parts = [render_paragraph(format_headline(found)), *([html_table(HEADER, rows, [""] * len(rows))] if rows else [])]
    return wrap_html(
        [*parts, *map(render_paragraph, filter(None, [left_out, *format_fixed_lines(found), *format_obstacles(found)]))]
    )


def make_table_rows(blocks: Sequence[ScaleBlock]) -> tuple[list[Row], str]:
    """Return a row per block, or per similar blocks if there are many, and a line on what was left out."""
    rows = [_make_table_row(block) for block in blocks]
    sizes = [block.scales for block in blocks]
    for numbers in FOLDS:
        if len(rows) > MOST_ROWS:
            # Only blocks that are alike in all but names: the numbers of scales and of tied layers stay.
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
        "saltflat.render.symmetry_blocks.summarize_symmetries(group).blocks has all."
    )


def merge_similar_rows(
    rows: Sequence[Row], keys: Sequence[Hashable], numbers: str
) -> tuple[list[Row], list[list[int]]]:
    """Merge rows of one key that differ only in numbers, with stars for these; also return the rows merged.

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
