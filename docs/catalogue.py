"""Prints docs/measures.md from the catalogue: python docs/catalogue.py > docs/measures.md"""

from __future__ import annotations

from collections.abc import Mapping

import saltflat
from saltflat.engine.statistic import COSTS
from saltflat.measures.catalog import CatalogueEntry
from saltflat.measures.registry import MEASURES, PRESETS, REFERENCES, SYMMETRIES

HEAD = """# Measures

Generated from the catalogue by `python docs/catalogue.py > docs/measures.md`; do not edit. `saltflat list` prints the
same. [choosing.md](choosing.md) says which to take, [misprints.md](misprints.md) where papers print something else.

*Unchanged by* is what the tests hold each measure to, both ways: what is claimed must hold, and what is not claimed
must visibly fail.
"""

COST = """*Cost* is what a measure needs beside the model and the data, with its usual options:
"""

SEVERAL = """Some names stand for several measures, those first that rescaling cannot fool:
"""


def main() -> None:
    print(page(), end="")


def page() -> str:
    """The whole file."""
    entries = list(saltflat.list_measures())
    parts = [HEAD, *described(SYMMETRIES), "", COST, *described(COSTS), "", SEVERAL, *described(PRESETS), ""]
    family = ""
    for entry in entries:
        if family_of(entry) != family:
            family = family_of(entry)
            parts += [f"## {family}", ""]
        parts += [*section(entry), ""]
    used = dict.fromkeys(entry.reference for entry in entries)
    parts += ["## References", "", *(f"* **{key}**: {REFERENCES[key]}" for key in sorted(used))]
    return "\n".join(parts) + "\n"


def described(names: Mapping[str, str]) -> list[str]:
    return [f"* `{name}`: {meaning}." for name, meaning in names.items()]


def family_of(entry: CatalogueEntry) -> str:
    """The name of the file that the measure is in."""
    return MEASURES[entry.name].function.__module__.rpartition(".")[2].capitalize()


def section(entry: CatalogueEntry) -> list[str]:
    options = ", ".join(f"`{name}={value!r}`" for name, value in entry.options.items())
    return [
        f"### {entry.name}",
        "",
        entry.meaning,
        "",
        f"* Formula: {entry.formula}",
        f"* Unchanged by: {', '.join(f'`{each}`' for each in entry.invariant_to) or 'no rescaling'}",
        f"* Smaller is: {entry.smaller}",
        f"* Needs: {', '.join(f'`{each}`' for each in entry.needs)}",
        f"* Cost: {entry.cost}",
        *([f"* Options: {options}"] if options else []),
        f"* From: {entry.reference}",
    ]


if __name__ == "__main__":
    main()
