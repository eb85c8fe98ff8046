"""Print docs/measures.md from the catalog of measures: python docs/catalogue.py > docs/measures.md"""

from __future__ import annotations

from collections.abc import Mapping

import saltflat
from saltflat.engine.statistic import COSTS
from saltflat.measures.catalog import CatalogueEntry
from saltflat.measures.registry import MEASURES, PRESETS, REFERENCES, SYMMETRIES

HEAD = """# Measures

Generated from the catalog by `python docs/catalogue.py > docs/measures.md`; do not edit. `saltflat list` prints the
same. [How to choose](choosing.md) says which to use, [misprints](misprints.md) where papers print something else.

The tests check *unchanged by* for each measure, both ways: what is claimed must hold, and what is not claimed must
visibly fail.
"""

COST = """*Cost* is what a measure takes with its default options:
"""

SEVERAL = """Some names select several measures, starting with those that rescaling cannot fool:
"""


def main() -> None:
    print(make_page(), end="")


def make_page() -> str:
    """Return the whole page."""
    entries = list(saltflat.list_measures())
    parts = [
        HEAD,
        *list_meanings(SYMMETRIES),
        "",
        COST,
        *list_meanings(COSTS),
        "",
        SEVERAL,
        *list_meanings(PRESETS),
        "",
    ]
    family = ""
    for entry in entries:
        if find_family(entry) != family:
            family = find_family(entry)
            parts += [f"## {family}", ""]
        parts += [*make_section(entry), ""]
    used = dict.fromkeys(entry.reference for entry in entries)
    parts += ["## References", "", *(f"* **{key}**: {REFERENCES[key]}" for key in sorted(used))]
    return "\n".join(parts) + "\n"


def list_meanings(names: Mapping[str, str]) -> list[str]:
    """Return a Markdown list of names and their meanings."""
    return [f"* `{name}`: {meaning}." for name, meaning in names.items()]


def find_family(entry: CatalogueEntry) -> str:
    """Return the name of the file that defines the measure."""
    return MEASURES[entry.name].function.__module__.rpartition(".")[2].capitalize()


def make_section(entry: CatalogueEntry) -> list[str]:
    """Return the lines about one measure."""
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
