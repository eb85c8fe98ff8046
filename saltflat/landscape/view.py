"""What a landscape says in words: the same on paper, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.landscape.normalizing import WORDS
from saltflat.report.page import render_html_table as html_table
from saltflat.report.page import render_paragraph, wrap_html
from saltflat.report.table import add_number_column, build_ruled_table
from saltflat.report.text import format_number, make_printable

if TYPE_CHECKING:
    from saltflat.landscape.result import Landscape

HEADER = ("direction", "length", "curvature", "loss at one end", "and at the other")


class LandscapeRenderable:
    """The landscape as rich renders it."""

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        landscape = self.landscape
        yield Text(make_printable(landscape.model), style="bold")
        yield Text(" | ".join(format_landscape_facts(landscape)) + "\n")
        table = build_ruled_table("direction")
        for column in HEADER[1:]:
            add_number_column(table, column)
        for row in make_landscape_rows(landscape):
            table.add_row(*map(Text, row))
        yield table
        yield Text("")
        for line in format_landscape_notes(landscape):
            yield Text(line)


def format_landscape_html(landscape: Landscape) -> str:
    """The same as a piece of HTML."""
    lines = make_landscape_rows(landscape)
    parts = [
        render_paragraph(landscape.model),
        render_paragraph(" | ".join(format_landscape_facts(landscape))),
        html_table(HEADER, lines, [WORDS.get(str(each["normalize"]), "") for each in landscape.directions]),
        *map(render_paragraph, format_landscape_notes(landscape)),
    ]
    return wrap_html(parts)


def format_landscape_facts(landscape: Landscape) -> list[str]:
    """What was sliced, and how, in a line."""
    settings, size = landscape.settings, " x ".join(str(len(each)) for each in landscape.coordinates)
    error = [] if landscape.error is None else [f"error {landscape.error:.2%}"]
    said = [f"{size} points", f"{landscape.examples} example{'s' * (landscape.examples != 1)}"]
    said += [f"loss {format_number(landscape.loss)} ({settings.get('loss')})", *error, str(settings.get("dtype"))]
    said += [str(settings.get("device")), f"{format_number(landscape.seconds, 3)} s"]
    return [make_printable(each) for each in said]


def make_landscape_rows(landscape: Landscape) -> list[list[str]]:
    """A line for each direction: how it bends in the middle, and how high it is at both ends."""
    found = []
    for axis, (direction, bend) in enumerate(zip(landscape.directions, landscape.curvature, strict=True)):
        along = [len(each) // 2 for each in landscape.coordinates]
        ends = []
        for end in (0, -1):
            place = tuple(end if a == axis else n for a, n in enumerate(along))
            ends.append(f"{format_number(float(landscape.losses[place]))} at {landscape.coordinates[axis][end]:g}")
        found.append(
            [
                format_direction_name(direction, axis),
                format_number(float(direction["length"])),
                format_number(bend),
                *ends,
            ]
        )
    return found


def format_direction_name(direction: Mapping[str, Any], axis: int) -> str:
    """As tables and axes call it.

    >>> format_direction_name({"kind": "eigenvector", "eigenvalue": 12.5, "normalize": "length"}, 0)
    'eigenvector 1 (eigenvalue 12.5)'
    """
    value = direction.get("eigenvalue")
    normalize = str(direction.get("normalize"))
    known = [] if value is None else [f"eigenvalue {format_number(float(value))}"]
    usual = "length" if direction["kind"] == "eigenvector" else "none"
    how = [] if normalize == usual else [f"by {normalize}"]
    word = {"random": "random direction", "given": "direction"}.get(str(direction["kind"]), str(direction["kind"]))
    told = f" ({', '.join([*known, *how])})" if known or how else ""
    return make_printable(f"{word} {axis + 1}{told}")


def format_landscape_notes(landscape: Landscape) -> list[str]:
    """The lowest point, what overflowed, and the notes."""
    losses, said = landscape.losses, []
    finite = np.isfinite(losses)
    lowest = np.unravel_index(np.argmin(np.where(finite, losses, np.inf)), losses.shape)
    if losses[lowest] < landscape.loss:
        where = ", ".join(f"{each[n]:g}" for each, n in zip(landscape.coordinates, lowest, strict=True))
        said.append(f"The lowest of these points is not the middle: {format_number(float(losses[lowest]))} at {where}.")
    if not finite.all():
        said.append(f"At {int((~finite).sum())} of {losses.size} points the loss is not finite.")
    return [make_printable(each) for each in (*said, *landscape.notes)]
