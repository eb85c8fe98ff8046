"""Render a bound in words, as tables and as a plot against the risk of guessing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.errors import import_optional
from saltflat.measures.registry import REFERENCES
from saltflat.render.report import render_html_table as html_table
from saltflat.render.report import render_paragraph, wrap_html
from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    format_count,
    format_number,
    make_printable,
    strip_markup,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saltflat.bounds.bound import Bound

STATES = {True: "met", False: "not met", None: "cannot be checked"}
HEADER = ("term", "value")
# By loss: what a network does on new data, and what guessing does.
PHRASES = {
    "error": ("errs on at most {} of new examples", "guessing errs on {}"),
    "cross_entropy": ("has a cross-entropy on new data of at most {}", "guessing has {}"),
    "clipped_cross_entropy": ("has a clipped cross-entropy on new data of at most {}", "guessing has {}"),
}


class BoundRenderable:
    """Rich renderable of a bound."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(format_bound_answer(self.bound)) + "\n", style="bold")
        rows = make_term_rows(self.bound)
        if rows:
            table = build_ruled_table(HEADER[0])
            add_number_column(table, HEADER[1])
            for row in rows:
                table.add_row(*map(Text, row))
            yield table
            yield Text("")
        for line in [*format_assumptions(self.bound), *format_bound_notes(self.bound), *format_source(self.bound)]:
            yield Text(line)
        yield Text(" | ".join(format_bound_facts(self.bound)))


def format_bound_html(bound: Bound) -> str:
    """Return the bound as HTML."""
    rows = make_term_rows(bound)
    below = [*format_assumptions(bound), *format_bound_notes(bound), *format_source(bound)]
    parts = [
        *map(render_paragraph, format_bound_answer(bound)),
        html_table(HEADER, rows, [""] * len(rows)) if rows else "",
        *map(render_paragraph, [*below, " | ".join(format_bound_facts(bound))]),
    ]
    return wrap_html(filter(None, parts))


def format_bound_answer(bound: Bound) -> list[str]:
    """Return what the bound says, as a sentence, and another one if it says nothing."""
    does, guesses = PHRASES.get(
        bound.loss, (f"has a risk ({bound.loss}) on new data of at most {{}}", "guessing has {}")
    )
    if math.isnan(bound.value):
        said = [f"The bound for {bound.quantity} is undefined."]
    else:
        # Above 1, a bound is no percentage.
        above = bound.loss == "error" and bound.value > 1
        risk = _format_risk(1.0 if above else bound.value, bound.loss)
        more = f"; the bound is {_format_risk(bound.value, bound.loss)}" if above else ""
        said = [f"{_format_claim(bound)} {bound.quantity} {does.format(risk)}{more}."]
    if bound.is_vacuous:
        said.append(f"This is vacuous: {guesses.format(_format_risk(bound.chance, bound.loss))}.")
    return [make_printable(each) for each in said]


def _format_claim(bound: Bound) -> str:
    """Return how sure the bound is, as the beginning of a sentence."""
    if bound.kind == "heuristic":
        return "Heuristic, not a guarantee:"
    if not bound.is_valid:
        return "Not a guarantee, since an assumption is not met:"
    return f"With probability at least {_format_probability(bound.delta)},"


def _format_probability(delta: float) -> str:
    """Format 1 - delta, rounded down."""
    if not 1e-9 <= delta <= 1:
        return f"1 - {delta:g}"
    failing = 100 * Decimal(repr(delta))
    places = max(2, 1 - failing.adjusted())
    return f"{_format_plain((100 - failing).quantize(Decimal(1).scaleb(-places), ROUND_FLOOR))} %"


def _format_risk(value: float, loss: str) -> str:
    """Format a risk, rounded up: an error up to 1 in percent, anything else as it is."""
    if not math.isfinite(value):
        return format_number(value)
    percent = loss == "error" and 0 <= value <= 1
    number = Decimal(repr(value)) * (100 if percent else 1)
    # Two places for percents, and four digits otherwise, but never fewer than three digits.
    least = number.adjusted() - 2 if percent else number.adjusted() - 3
    exponent = min(-2, least) if percent else least
    shown = number.quantize(Decimal(1).scaleb(exponent), ROUND_CEILING) if number else number
    return f"{_format_plain(shown)} %" if percent else format_number(float(shown))


def round_up(value: float) -> str:
    """Format a number with four digits, rounded up, since a bound that is rounded down is none.

    >>> round_up(0.12341), round_up(12.0)
    ('0.1235', '12')
    """
    return _format_risk(value, "")


def _format_plain(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def make_term_rows(bound: Bound) -> list[list[str]]:
    """Return a row for each term, in the order of the computation."""
    return [[make_printable(name), format_number(value, 6)] for name, value in bound.terms.items()]


def format_assumptions(bound: Bound) -> list[str]:
    """Return a line for each assumption: whether it is met, and what was checked."""
    found = [
        f"Assumption, {STATES[each.met]}: {_join_sentences(each.text, each.evidence)}" for each in bound.assumptions
    ]
    return [make_printable(each) for each in found]


def _join_sentences(*parts: str) -> str:
    return " ".join(part if part.endswith((".", "!", "?")) else f"{part}." for part in parts if part)


def format_bound_notes(bound: Bound) -> list[str]:
    """Return the notes, a line for each."""
    return [make_printable(f"Note: {note}") for note in bound.notes]


def format_source(bound: Bound) -> list[str]:
    """Return the formula and the paper."""
    said = [f"Formula: {strip_markup(bound.formula)}"] if bound.formula else []
    if bound.reference:
        said.append(f"Reference: {REFERENCES.get(bound.reference, bound.reference)}")
    return [make_printable(each) for each in said]


def format_bound_facts(bound: Bound) -> list[str]:
    """Return what was computed, and how, as the parts of a line."""
    said = [bound.name, bound.model, format_count(bound.examples, "example"), f"delta {format_number(bound.delta)}"]
    said += [f"loss {bound.loss.replace('_', ' ')}", f"{format_number(bound.seconds, 3)} s"]
    return [make_printable(each) for each in said if each]


def find_additive_terms(bound: Bound) -> dict[str, float]:
    """Return the positive terms that ``details["parts"]`` names, if they add up to the bound; empty otherwise."""
    named = bound.details.get("parts")
    terms = {name: bound.terms[name] for name in named if name in bound.terms} if isinstance(named, list) else {}
    if not math.isclose(math.fsum(terms.values()), bound.value, rel_tol=1e-9) or min(terms.values(), default=-1) < 0:
        return {}
    return {name: value for name, value in terms.items() if value > 0}


DECADES = 2.0  # span of the values above which the axis is logarithmic
BAR, FADED, CHANCE = "#0072b2", "#9bbcd4", "black"
LONGEST_NAME = 40
LARGEST, SMALLEST = 1e100, 1e-100  # that are drawn


def plot_bounds(bounds: Sequence[Bound]) -> Figure:
    """Return a Figure with a bar for each bound beside the risk of guessing, and a panel for each loss.

    Terms that add up to a bound are parts of its bar on a linear axis, and stand beside it on a logarithmic one, where
    lengths do not add up. The Figure is made without pyplot, so that there is no window and nothing to close.
    """
    panels: dict[str, list[Bound]] = {}
    for bound in bounds:
        panels.setdefault(bound.loss, []).append(bound)
    heights = [1.1 + 0.62 * len(each) for each in panels.values()]
    figures = import_optional("matplotlib.figure", "plot()")
    figure: Figure = figures.Figure(figsize=(8.0, 0.4 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, found in zip(axes, panels.values(), strict=True):
        _draw_panel(axis, found)
    return figure


def _draw_panel(axis: Axes, bounds: Sequence[Bound]) -> None:
    known = [each.value for each in bounds if abs(each.value) < LARGEST]
    seen = [value for value in [*known, *(each.chance for each in bounds)] if SMALLEST < value < LARGEST]
    log = min([*known, 1.0]) > SMALLEST and bool(seen) and math.log10(max(seen)) - math.log10(min(seen)) > DECADES
    right = max(seen, default=1.0)
    if log:
        axis.set_xscale("log")
        axis.set_xlim(min(seen) / 3, right * 30)
    else:
        axis.set_xlim(min([0.0, *known]), right * 1.3)
    for place, bound in enumerate(bounds):
        _draw_bound(axis, place, bound, log)
    _draw_chance(axis, bounds)
    axis.set_yticks(range(len(bounds)), [_format_bar_name(bound) for bound in bounds], fontsize=9, parse_math=False)
    axis.set_ylim(len(bounds) - 0.4, -0.6)
    axis.spines[["top", "right"]].set_visible(False)
    risk = make_printable(bounds[0].loss.replace("_", " "))
    axis.set_xlabel(f"bound on the {risk} on new data", fontsize=9, parse_math=False)
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        legend = axis.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _format_bar_name(bound: Bound) -> str:
    name = make_printable(bound.name)
    name = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."
    return f"{name}\n(no guarantee)" if not bound.is_valid else name


def _draw_bound(axis: Axes, place: int, bound: Bound, log: bool) -> None:
    if not abs(bound.value) < LARGEST:
        axis.annotate(
            format_number(bound.value), (0.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8
        )
        return
    parts = find_additive_terms(bound)
    told = _format_risk(bound.value, bound.loss)
    if log or not parts:
        axis.barh(place, bound.value, 0.5, color=BAR if bound.is_valid else FADED)
    else:
        left = 0.0
        taken = axis.get_legend_handles_labels()[1]
        for name, value in parts.items():
            label = make_printable(name)[:LONGEST_NAME]
            index = taken.index(label) if label in taken else len(taken)
            axis.barh(
                place, value, 0.5, left=left, color=f"C{index}", alpha=1.0 if bound.is_valid else 0.5,
                label="_" if label in taken else label, edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            taken += [] if label in taken else [label]
            left += value
    if log and parts:
        told += "\n= " + " + ".join(format_number(value, 2) for value in parts.values())
    axis.annotate(
        told,
        (max(bound.value, 0.0), place),
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        parse_math=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # above the line of guessing
    )


def _draw_chance(axis: Axes, bounds: Sequence[Bound]) -> None:
    """Draw a line at the risk of guessing, or one across each bar if they differ."""
    found = {each.chance for each in bounds}
    label = f"guessing: {_format_risk(bounds[0].chance, bounds[0].loss)}" if len(found) == 1 else "guessing"
    for place, bound in enumerate(bounds):
        if abs(bound.chance) < LARGEST:
            ends = [place - 0.5, place + 0.5]
            axis.plot([bound.chance] * 2, ends, color=CHANCE, linestyle="--", linewidth=1.2, label=label)
            label = "_"
