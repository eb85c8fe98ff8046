"""Render the effects of settings as sentences and text tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    can_fit,
    fold_name,
    format_count,
    format_factor,
    format_short,
    join_words,
    make_printable,
)
from saltflat.results.verdict import VARIANTS
from saltflat.studies.effects.results import HIGHER, LOWER, TOO_FEW

if TYPE_CHECKING:
    from saltflat.studies.effects.results import AxisEffects, Change, Effects, Estimate, ValueEffects


WIDEST = 26
NOT_RUN = {"missing": "not yet run"}
NOTHING = "No setting varies: there is nothing to compare."
LEGEND = (
    "x: the ratio to the reference; +, -: the difference. Means of quantities with ratios are geometric. "
    "~: no clear difference."
)


class EffectsTables:
    """Rich renderable of effects: for every axis a row per quantity, in as many tables as the width requires."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        effects = self.effects
        facts = [format_count(effects.runs, "run")]
        if effects.left_out:
            reasons = [f"{count} {NOT_RUN.get(reason, reason)}" for reason, count in effects.left_out.items()]
            facts.append(f"left out: {', '.join(reasons)}")
        yield Text(make_printable(" | ".join(facts)) + "\n")
        if not effects.axes:
            yield Text(NOTHING)
        if len(effects.axes) > 1:
            for axis in effects.axes.values():
                for sentence in format_answers(effects, axis):
                    yield Text(make_printable(f"* {sentence}"))
            yield Text("")
        for axis in effects.axes.values():
            yield Text(make_printable(f"{axis.name}, compared with {axis.describe(axis.base)}"), style="bold")
            for sentence in format_answers(effects, axis) if len(effects.axes) == 1 else ():
                yield Text(make_printable(sentence))
            yield Text("")
            rest = list(axis.others)
            while rest:
                count = 1
                while count < len(rest) and can_fit(self._render_table(axis, rest[: count + 1]), console, options):
                    count += 1
                yield self._render_table(axis, rest[:count])
                yield Text("")
                rest = rest[count:]
        for line in [*([LEGEND] if effects.axes else []), *format_unknown(effects), *effects.notes]:
            yield Text(make_printable(line))
        for warning in effects.warnings:
            yield Text(make_printable(f"Warning: {warning}"), style="bold")

    def _render_table(self, axis: AxisEffects, values: list[ValueEffects]) -> Table:
        table = build_ruled_table("mean, change")
        add_number_column(table, f"{make_printable(axis.describe(axis.base))}\n{format_count(axis.base.runs, 'run')}")
        for value in values:
            add_number_column(table, f"{make_printable(axis.describe(value))}\n{format_count(value.runs, 'run')}")
            add_number_column(table, f"change, 95 %\n{format_count(value.pairs, 'pair')}")
        kind = None
        for name, quantity in self.effects.quantities.items():
            if kind is not None and quantity.kind != kind:
                table.add_row("")
            kind = quantity.kind
            cells = [fold_name(name, WIDEST), format_value(axis.base.means[name].estimate.value)]
            for value in values:
                cells += [format_value(value.means[name].estimate.value), format_change(value.changes[name])]
            table.add_row(*map(Text, cells))
        return table


def format_value(value: float) -> str:
    """Format a mean; a dash if there is none."""
    return "-" if math.isnan(value) else format_short(value, 3)


def format_change(change: Change) -> str:
    """Format a change with its interval and verdict, ``x 0.62 (0.5 to 0.77) lower *``."""
    if math.isnan(change.estimate.value):
        return "-"
    star = " *" if change.is_sure else ""
    verdict = {TOO_FEW: "too few", LOWER: LOWER + star, HIGHER: HIGHER + star}.get(change.verdict, "~")
    return f"{format_estimate(change.estimate, change.ratio is not None)} {verdict}"


def format_estimate(estimate: Estimate, is_ratio: bool) -> str:
    """Format a ratio or a difference with its interval."""
    ends = [estimate.low, estimate.high] if estimate.has_interval else []
    told = [_format_ratio(each) if is_ratio else format_short(each, 2, "+") for each in (estimate.value, *ends)]
    lead = "x " * is_ratio + told[0]
    return f"{lead} ({told[1]} to {told[2]})" if ends else lead


def _format_ratio(value: float) -> str:
    return format_factor(value) if 0 < value < math.inf else format_short(value)


def format_answers(effects: Effects, axis: AxisEffects) -> list[str]:
    """Return a sentence per value: is it flatter than the reference, and does it generalize better?"""
    return [format_answer(effects, axis, value) for value in axis.others]


def format_answer(effects: Effects, axis: AxisEffects, value: ValueEffects) -> str:
    """Return whether a value is flatter than the reference, by how many measures, and how its test error compares.

    Only measures invariant to rescaling have a vote, if there are any; variants of a measure, and measures whose
    smaller values do not mean flatter, have none.
    """
    label = axis.describe(value)
    name = label if "," in axis.name else f"{axis.name} {label}"
    sided = [each for each in effects.quantities.values() if each.smaller == "flatter" and each.name not in VARIANTS]
    voters = [each.name for each in sided if each.is_invariant] or [each.name for each in sided]
    kind = "rescaling-invariant measure" if any(each.is_invariant for each in sided) else "measure"
    judged = [each for each in voters if value.changes[each].verdict != TOO_FEW]
    flatter = [each for each in judged if value.changes[each].verdict == LOWER]
    sharper = [each for each in judged if value.changes[each].verdict == HIGHER]
    if not voters:
        told = f"{name}: no measure of flatness was computed"
    elif not judged:
        told = f"{name}: too few pairs to say whether it is flatter ({format_count(value.pairs, 'pair')})"
    elif not flatter and not sharper:
        every = f"any of the {len(judged)} {kind}s" if len(judged) > 1 else f"the only {kind}, {judged[0]}"
        told = f"{name}: no clear difference in {every}"
    else:
        sides = {"flatter": flatter, "sharper": sharper}
        parts = [
            f"{side} according to {names[0]}"
            if len(judged) == 1
            else f"{side} according to {len(names)} of {len(judged)} {kind}s ({join_words(names)})"
            for side, names in sides.items()
            if names
        ]
        told = f"{name}: {join_words(parts)}"
        clear = [*flatter, *sharper]
        sure = [each for each in clear if value.changes[each].is_sure]
        if len(sure) < len(clear):
            remaining = f"{join_words(sure)} remain{'s' * (len(sure) == 1)}" if sure else "none of it remains"
            told += f"; {remaining} after Holm's correction"
    loss = value.changes["train_loss"]
    if loss.verdict in (LOWER, HIGHER):
        told += f"; its training loss is {loss.verdict} ({format_change(loss).partition(' (')[0]})"
    error = value.changes["test_error"]
    if error.verdict == TOO_FEW:
        return f"{told}."
    what = (
        "its test error is not clearly different"
        if error.verdict not in (LOWER, HIGHER)
        else (f"its test error is {error.verdict} by {format_short(abs(error.difference.value))}")
    )
    return f"{told}; {what}."


def format_unknown(effects: Effects) -> list[str]:
    """Return sentences on runs in which a quantity is unknown or not finite."""
    found: dict[str, int] = {}
    for axis in effects.axes.values():
        for name in effects.quantities:
            count = sum(value.means[name].unknown for value in axis.values)
            found[name] = max(found.get(name, 0), count)
    return [
        f"{name}: unknown or not finite in {format_count(count, 'run')}, which are left out of it."
        for name, count in found.items()
        if count
    ]
