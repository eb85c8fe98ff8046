"""What a spectrum says in words: the same on paper, in a terminal and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.report.page import framed, paragraph
from saltflat.report.page import table as html_table
from saltflat.report.table import MOST_LAYERS, add_numbers, ruled
from saltflat.report.text import number, printable, quantity

if TYPE_CHECKING:
    from saltflat.spectrum.result import Block, Spectrum

MATRIX = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton matrix"}
PAIRS = ("eigenvalue", "value", "error at most")
LAYERS = ("layer", "parameters", "largest", "second", "smallest", "trace")


class Described:
    """The spectrum as rich renders it."""

    def __init__(self, spectrum: Spectrum) -> None:
        self.spectrum = spectrum

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(printable(self.spectrum.model), style="bold")
        yield Text(" | ".join(facts(self.spectrum)) + "\n")
        header, lines = rows(self.spectrum)
        table = ruled(header[0])
        for column in header[1:]:
            add_numbers(table, column)
        for line in lines:
            table.add_row(*map(Text, line))
        yield table
        yield Text("")
        for said in below(self.spectrum):
            yield Text(said)


def page_of(spectrum: Spectrum) -> str:
    """The same as a piece of HTML."""
    header, lines = rows(spectrum)
    parts = [
        paragraph(spectrum.model),
        paragraph(" | ".join(facts(spectrum))),
        html_table(header, lines, [""] * len(lines)),
        *map(paragraph, below(spectrum)),
    ]
    return framed(parts)


def facts(spectrum: Spectrum) -> list[str]:
    """What was measured, and how, in a line."""
    settings = spectrum.settings
    said = [MATRIX.get(str(settings.get("matrix")), ""), f"{spectrum.examples} example{'s' * (spectrum.examples != 1)}"]
    said.append(f"loss {number(spectrum.loss)} ({settings.get('loss')})")
    said += [str(settings.get("dtype")), str(settings.get("device")), f"{number(spectrum.seconds, 3)} s"]
    return [printable(each) for each in said]


def rows(spectrum: Spectrum) -> tuple[tuple[str, ...], list[list[str]]]:
    """A line for each eigenvalue of the network, or one for each layer."""
    if len(spectrum) == 1:
        return PAIRS, _pairs(spectrum.only)
    return LAYERS, [_layer(block) for block in shown(spectrum)]


def shown(spectrum: Spectrum, count: int = MOST_LAYERS) -> list[Block]:
    """The layers of the largest eigenvalues, in the order of the network."""
    sizes = sorted((max(map(abs, block.ends)) for block in spectrum.values()), reverse=True)
    least = sizes[min(count, len(sizes)) - 1]
    return [block for block in spectrum.values() if max(map(abs, block.ends)) >= least][:count]


def _pairs(block: Block) -> list[list[str]]:
    named = [(f"largest {n}", pair) for n, pair in enumerate(block.largest, 1)]
    named += reversed([(f"smallest {n}", pair) for n, pair in enumerate(block.smallest, 1)])
    return [[name, number(pair.value, 6), f"{pair.bound:.1e}" + "!" * (not pair.converged)] for name, pair in named]


def _layer(block: Block) -> list[str]:
    values = [number(pair.value) + "!" * (not pair.converged) for pair in block.largest[:2]]
    least = [number(pair.value) + "!" * (not pair.converged) for pair in block.smallest[:1]]
    trace = quantity(block.trace, block.trace_stderr) if block.has_density else ""
    return [printable(block.name), f"{block.parameters:,}", *(*values, "")[:2], *(least or [""]), trace]


def below(spectrum: Spectrum) -> list[str]:
    """The trace, what the errors cover, and the notes."""
    said = []
    if len(spectrum) == 1 and spectrum.only.has_density:
        said.append(f"Trace: {quantity(spectrum.trace, spectrum.trace_stderr)}.")
    if any("!" in cell for line in rows(spectrum)[1] for cell in line):
        said.append("! did not converge")
    left = len(spectrum) - len(shown(spectrum))
    if left:
        said.append(f"... and {left} more layers with less curvature.")
    probes = max((len(block.nodes) for block in spectrum.values()), default=0)
    if probes:
        said.append(
            f"The errors of trace and density are over {probes} random probes: they say how far other probes would "
            "have led, not how far other examples would."
        )
    return [printable(each) for each in (*said, *(f"Note: {note}" for note in spectrum.notes))]
