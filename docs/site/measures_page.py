"""The page of all measures, made from their registry: docstrings with formulas, claims, options, costs and sources."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from sphinx.ext.napoleon import GoogleDocstring

sys.path.insert(0, str(Path(__file__).parent.parent))

from catalogue import COST, SEVERAL, find_family, list_meanings

import saltflat
from saltflat.engine.statistic import COSTS
from saltflat.measures.catalog import CatalogueEntry
from saltflat.measures.registry import MEASURES, PRESETS, REFERENCES, SYMMETRIES

HEAD = """# Measures

All {count} measures, as `saltflat list` prints them, with their formulas. [How to choose](choosing.md) says which to
use, [misprints](misprints.md) where papers print something else, and the [API reference](../api/measures.md) what each
function is called with.

The tests check *unchanged by* for each measure, both ways: what is claimed must hold, and what is not claimed must
visibly fail.
"""

SYMBOLS = r"""In formulas, {math}`L` is the mean loss over the data, {math}`w` or {math}`\theta` are the weights,
{math}`W_l` those of layer {math}`l`, {math}`H` is the curvature of {math}`L` and {math}`H_l` its block of layer
{math}`l`, {math}`\nabla \ell_n` the gradient of example {math}`n`, and {math}`I` the Fisher matrix.
"""

TITLES = {
    "Adaptive": "Rise of the loss",
    "Classical": "Classical",
    "Fisher": "Fisher",
    "Minimum": "Minimum sharpness",
    "Normalized": "Normalized sharpness",
    "Relative": "Relative flatness",
}

# Of measures whose docstrings refer to another one.
FORMULAS = {
    "kappa_max": r"\max_l \|w_l\|_F^2 \, \lambda_{\max}(H_l)",
    "kappa_trace_max": r"\max_l \|w_l\|_F^2 \, \mathrm{tr}\, H_l",
    "rho_max": r"\max_{l, j} w_l(j)^T H_{l,j} w_l(j)",
}


def make_measures_page() -> str:
    """Return the whole page."""
    entries = list(saltflat.list_measures())
    parts = [HEAD.format(count=len(entries)), *list_meanings(SYMMETRIES), "", COST, *list_meanings(COSTS), ""]
    parts += [SEVERAL, *list_meanings(PRESETS), "", SYMBOLS]
    family = ""
    for entry in entries:
        if find_family(entry) != family:
            family = find_family(entry)
            parts += [f"## {TITLES.get(family, family)}", ""]
        parts += make_section(entry)
    used = sorted({entry.reference for entry in entries})
    parts += ["## References", "", *(f"* {REFERENCES[key]}" for key in used)]
    return "\n".join(parts) + "\n"


def make_section(entry: CatalogueEntry) -> list[str]:
    """Return the lines about one measure."""
    function = MEASURES[entry.name].function
    options = ", ".join(f"``{name}={value!r}``" for name, value in entry.options.items())
    unchanged = ", ".join(f"``{each}``" for each in entry.invariant_to) or "no rescaling"
    rows = {
        "In words": entry.formula,
        "Unchanged by": unchanged,
        "Smaller is": entry.smaller,
        "Needs": ", ".join(f"``{each}``" for each in entry.needs),
        "Cost": f"``{entry.cost}``",
        "Options": options,
        "From": REFERENCES[entry.reference],
        "API": f":func:`{entry.name} <{function.__module__}.{entry.name}>`",
    }
    facts = [f":{label}: {_escape(text) if label == 'In words' else text}" for label, text in rows.items() if text]
    return [
        f"### {entry.name}",
        "",
        "```````{eval-rst}",
        f".. currentmodule:: {function.__module__}",
        "",
        make_text(entry.name),
        "",
        ".. container:: facts",
        "",
        *(f"   {fact}" for fact in facts),
        "```````",
        "",
    ]


def make_text(name: str) -> str:
    """Return what a docstring says before its arguments and examples, as reStructuredText, with the formula."""
    text = inspect.getdoc(MEASURES[name].function) or ""
    prose = re.split(r"^(?:Args|Returns|Raises|Example|Examples):$", text, flags=re.MULTILINE)[0].strip()
    made = str(GoogleDocstring(prose))
    return f"{made}\n\n.. math::\n    {FORMULAS[name]}" if name in FORMULAS else made


def _escape(text: str) -> str:
    return re.sub(r"([\\*_|`])", r"\\\1", text)
