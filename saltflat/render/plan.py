"""Render a plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from saltflat.engine.progress import format_duration
from saltflat.results.text import (
    add_number_column,
    build_ruled_table,
    fold_name,
    format_number,
    join_words,
    make_printable,
)

if TYPE_CHECKING:
    from saltflat.results.plan import MeasurementPlan, ParameterPlan

MOST_ROWS = 30  # parameters that are listed one by one; more are listed by way and reason
NAME_WIDTH = 40
LEAST_SHARE = 0.02  # of the time that a step is worth a mention for


class PlanRenderable:
    """Rich renderable of a plan."""

    def __init__(self, plan: MeasurementPlan) -> None:
        self.plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan = self.plan
        yield Text(make_printable(plan.model), style="bold")
        yield Text(" | ".join(_format_facts(plan)) + "\n")
        table = build_ruled_table("parameter")
        table.columns[0].no_wrap = True  # names are folded, so that only reasons are wrapped
        add_number_column(table, "entries")
        table.add_column("way")
        table.add_column("why")
        for names, numbers, way, why in _make_rows(plan.parameters):
            table.add_row(fold_name(names, NAME_WIDTH), f"{numbers:,}", way, make_printable(why))
        yield table
        yield Text("")
        for line in format_plan_lines(plan):
            yield Text(line)


def _format_facts(plan: MeasurementPlan) -> list[str]:
    settings = plan.settings
    said = [f"{plan.examples} example{'s' * (plan.examples != 1)}", f"loss {settings.get('loss')}"]
    said += [f"columns {settings.get('columns')}", str(settings.get("dtype")), plan.device]
    return [make_printable(each) for each in said]


def _make_rows(parameters: tuple[ParameterPlan, ...]) -> list[tuple[str, int, str, str]]:
    """Return names, number of entries, way and reason of each row."""
    if len(parameters) <= MOST_ROWS:
        return [(each.name, _count(each), each.way, each.why) for each in parameters]
    alike: dict[tuple[str, str], list[ParameterPlan]] = {}
    for each in parameters:
        alike.setdefault((each.way, each.why), []).append(each)
    return [
        (
            several[0].name + (f" and {len(several) - 1} more" if len(several) > 1 else ""),
            sum(map(_count, several)),
            way,
            why,
        )
        for (way, why), several in alike.items()
    ]


def _count(parameter: ParameterPlan) -> int:
    numbers = 1
    for size in parameter.shape:
        numbers *= size
    return numbers


def format_plan_lines(plan: MeasurementPlan) -> list[str]:
    """Return the lines below the table: measures, symmetries, time, memory and notes."""
    lines = [f"Computes: {join_words(list(plan.measures)) or 'nothing'}"]
    by_reason: dict[str, list[str]] = {}
    for name, reason in plan.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    lines += [f"Leaves out: {join_words(names)}: {reason}" for reason, names in by_reason.items()]
    lines.append(f"Symmetries: {plan.symmetries}")
    steps = sorted(plan.predicted_seconds_by_step.items(), key=lambda each: -each[1])
    shown = [
        f"{step} {format_number(seconds, 2)} s"
        for step, seconds in steps
        if seconds >= LEAST_SHARE * plan.predicted_seconds
    ]
    lines.append(f"Time: about {format_duration(plan.predicted_seconds)} ({', '.join(shown)})")
    limit = int(plan.settings.get("memory", 0)) >> 20
    size = "not known on this system" if plan.predicted_bytes is None else f"about {plan.predicted_bytes >> 20} MiB"
    lines.append(f"Memory: {size} beyond the model and what is held now (memory={limit} MiB)")
    lines += [f"Note: {note}" for note in plan.notes]
    return [make_printable(line) for line in lines]
