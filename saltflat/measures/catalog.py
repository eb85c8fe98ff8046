"""The list of all measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.text import Text

from saltflat.measures.registry import MEASURES
from saltflat.results.text import render_text, strip_markup


@dataclass(frozen=True)
class CatalogueEntry:
    """An entry of the catalog: all that is known of a measure without a model.

    Attributes:
        name: how to ask for it.
        meaning: what the number says.
        formula: in words.
        invariant_to: the rescalings that leave it as it is.
        smaller: what a smaller value says.
        needs: the statistics it is made of.
        reference: where it comes from.
        options: what can be chosen, with the usual values.
        cost: ``"sweep"``, ``"passes"`` or ``"search"``; see :data:`saltflat.engine.statistic.COSTS`.
    """

    name: str
    meaning: str
    formula: str
    invariant_to: tuple[str, ...]
    smaller: str
    needs: tuple[str, ...]
    reference: str
    options: Mapping[str, Any]
    cost: str


class Catalogue(Sequence[CatalogueEntry]):
    """The catalog of measures by family, which prints as a list at the width of the terminal."""

    def __init__(self, entries: Sequence[CatalogueEntry]) -> None:
        self.entries = tuple(entries)

    @overload
    def __getitem__(self, which: int) -> CatalogueEntry: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[CatalogueEntry]: ...
    def __getitem__(self, which: int | slice) -> CatalogueEntry | Sequence[CatalogueEntry]:
        return self.entries[which]

    def __iter__(self) -> Iterator[CatalogueEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for each in self:
            unchanged = ", ".join(each.invariant_to) or "no rescaling"
            yield Text.assemble(
                (each.name, "bold"), f" (unchanged by {unchanged}; smaller is {each.smaller}; cost: {each.cost})"
            )
            lines = [Text(each.meaning), Text(each.formula, style="dim")]
            lines.append(Text(f"needs {', '.join(each.needs)}; from {each.reference}", style="dim"))
            if each.options:
                said = ", ".join(f"{name}={value!r}" for name, value in each.options.items())
                lines.append(Text(f"options: {said}", style="dim"))
            yield Padding(Group(*lines), (0, 0, 1, 4))

    def __str__(self) -> str:
        return render_text(self)

    def __repr__(self) -> str:
        return f"<Catalogue of {len(self)} measures>"


def list_measures() -> Catalogue:
    """List every measure: meaning, formula, invariance, statistics, cost and source.

    >>> [entry.invariant_to for entry in list_measures() if entry.name == "kappa"]
    [('layer_scale',)]
    """
    return Catalogue(
        [
            CatalogueEntry(
                each.name,
                strip_markup(each.meaning),
                strip_markup(each.formula),
                each.invariant_to,
                each.smaller,
                each.statistics,
                each.reference,
                dict(each.options),
                each.cost,
            )
            for each in MEASURES.values()
        ]
    )
