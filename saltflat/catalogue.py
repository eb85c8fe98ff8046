"""All measures there are, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from rich import box
from rich.console import Console
from rich.table import Table

from saltflat.measures import MEASURES
from saltflat.measures.references import REFERENCES


@dataclass(frozen=True)
class Entry:
    """What the catalogue says of a measure.

    Attributes:
        name: how to ask for it.
        meaning: what the number says.
        formula: in words.
        invariant_to: the rescalings that leave it as it is.
        smaller: what a smaller value says.
        needs: the statistics it is made of.
        reference: where it comes from.
        options: what can be chosen, with the usual values.
    """

    name: str
    meaning: str
    formula: str
    invariant_to: tuple[str, ...]
    smaller: str
    needs: tuple[str, ...]
    reference: str
    options: Mapping[str, Any]


class Catalogue(Sequence[Entry]):
    """Entries in the order of their families; prints as a table."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)

    @overload
    def __getitem__(self, which: int) -> Entry: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[Entry]: ...
    def __getitem__(self, which: int | slice) -> Entry | Sequence[Entry]:
        return self.entries[which]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __rich__(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, title="Measures", title_justify="left", show_lines=True)
        table.add_column("measure", style="bold", overflow="fold")
        table.add_column("what it says, and its formula", ratio=3)
        table.add_column("unchanged by", ratio=1)
        table.add_column("smaller is", ratio=1)
        table.add_column("needs; options", ratio=2, overflow="fold")
        table.add_column("from", overflow="fold")
        for each in self:
            options = ", ".join(f"{name}={value!r}" for name, value in each.options.items())
            table.add_row(
                each.name,
                f"{each.meaning}\n[dim]{each.formula}[/dim]",
                ", ".join(each.invariant_to) or "-",
                each.smaller,
                ", ".join(each.needs) + (f"\n[dim]{options}[/dim]" if options else ""),
                each.reference,
            )
        return table

    def __str__(self) -> str:
        console = Console(width=160)
        with console.capture() as text:
            console.print(self)
        return text.get()


def catalogue() -> Catalogue:
    """Every measure: what it says, its formula, what leaves it unchanged, what it needs and where it comes from.

    >>> [entry.invariant_to for entry in catalogue() if entry.name == "kappa"]
    [('layer_scale',)]
    """
    return Catalogue(
        [
            Entry(
                each.name,
                each.meaning,
                each.formula,
                each.invariant_to,
                each.smaller,
                each.statistics,
                each.reference,
                dict(each.options),
            )
            for each in MEASURES.values()
        ]
    )


assert all(each.reference in REFERENCES for each in MEASURES.values())
