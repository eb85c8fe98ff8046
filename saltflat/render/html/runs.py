"""Prepare the runs of a study for the script that plots them, and list those that did not succeed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saltflat.render.html.page import round_digits
from saltflat.results.json_codec import JsonValue
from saltflat.results.text import format_number, format_setting

if TYPE_CHECKING:
    from saltflat.studies.row import Row


# With more levels than this, a setting is shown as a color scale.
FEW = 7


def find_varied_settings(rows: Iterable[Row], axes: Sequence[str]) -> list[str]:
    """Return the settings that differ between runs: the axes first, then others, the seed last."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.config.items():
            seen.setdefault(name, set()).add(_encode_value(value))
    found = [name for name, values in seen.items() if len(values) > 1]
    places = {name: index for index, name in enumerate(axes)}
    return sorted(found, key=lambda name: (name == "seed", places.get(name, len(places))))


def find_constant_settings(rows: Sequence[Row], axes: Sequence[str]) -> dict[str, Any]:
    """Return the settings that all runs share."""
    differing = set(find_varied_settings(rows, axes))
    return {name: value for row in rows for name, value in row.config.items() if name not in differing}


def find_levels(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of a setting, each once, sorted if they have an order."""
    found = {_encode_value(each): each for row in rows for each in [row.config.get(name)]}
    values = list(found.values())
    try:
        return sorted(values)
    except TypeError:  # some are strings, some numbers, some not set
        return sorted(values, key=lambda value: (value is not None, str(value)))


def build_scatter_data(
    rows: Sequence[Row],
    axes: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    controls: Iterable[str] = (),
    first: str = "",
) -> dict[str, Any]:
    """Return the data of the scatter plot: by name, a number per run; settings as indices of their levels.

    Args:
        rows: the runs, in the order of all lists.
        axes: the settings that the grid varies.
        values: by measure or control, a number or None per run.
        controls: the names of the controls.
        first: the name shown first.
    """
    settings = []
    for name in find_varied_settings(rows, axes):
        known = find_levels(rows, name)
        places = {_encode_value(each): place for place, each in enumerate(known)}
        settings.append(
            {
                "name": name,
                "levels": [format_setting(each) for each in known],
                "numbers": _convert_numbers(known) if len(known) > FEW else None,
                "of": [places[_encode_value(row.config.get(name))] for row in rows],
            }
        )
    return {
        "controls": list(controls),
        "first": list(values).index(first) if first in values else 0,
        "keys": [row.key[:12] for row in rows],
        "status": [row.status for row in rows],
        "settings": settings,
        "gaps": {gap: [round_digits(row.gap.get(gap)) for row in rows] for gap in ("error", "loss")},
        "outcomes": {
            name: [None if row.outcome is None else round_digits(getattr(row.outcome, name), 4) for row in rows]
            for name in ("train_loss", "train_error", "test_loss", "test_error", "epochs")
        },
        "measures": [
            {"name": name, "values": [round_digits(each) for each in numbers], "errors": _collect_errors(rows, name)}
            for name, numbers in values.items()
        ],
    }


def collect_values(
    rows: Sequence[Row], controls: Mapping[str, Sequence[float | None]]
) -> dict[str, list[float | None]]:
    """Return a number per run by measure, then by control; a control named like a measure is marked."""
    names = dict.fromkeys(name for row in rows for name in row.readings)
    found: dict[str, list[float | None]] = {
        name: [row.readings[name].value if name in row.readings else None for row in rows] for name in names
    }
    own = {f"{name} (control)" if name in found else name: list(each) for name, each in controls.items()}
    return {**found, **own}


def _collect_errors(rows: Sequence[Row], name: str) -> list[float | int | None] | None:
    errors = [round_digits(row.readings[name].stderr, 3) if name in row.readings else None for row in rows]
    return errors if any(errors) else None


def _convert_numbers(values: Sequence[Any]) -> list[float] | None:
    """Return the values as floats if all of them are numbers."""
    numeric = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
    return [float(each) for each in values] if numeric else None


def _encode_value(value: JsonValue) -> str:
    """Return a key that distinguishes values that Python calls equal: 1, 1.0 and True."""
    return json.dumps(value, sort_keys=True, default=str)


MOST_LETTERS = 6_000
MOST_REASONS = 40


@dataclass(frozen=True)
class FailureGroup:
    """One error and the runs that ended with it."""

    error: str
    traceback: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class UnsuccessfulRun:
    """A run that missed its target or diverged: its settings, progress and notes."""

    run: str
    settings: str
    epochs: str
    train_loss: str
    train_error: str
    notes: tuple[str, ...]


def collect_failures(rows: Sequence[Row], axes: Sequence[str]) -> list[FailureGroup]:
    """Return the errors, the most frequent first."""
    names, found = find_varied_settings(rows, axes), dict[tuple[str, str], list[str]]()
    for row in rows:
        if row.status == "failed" or row.failure is not None:
            told = row.failure or {}
            reason = told.get("error") or "No reason was recorded."
            found.setdefault((reason, told.get("traceback", "")), []).append(format_run_name(row, names))
    most = sorted(found.items(), key=lambda each: -len(each[1]))
    return [
        FailureGroup(_truncate_middle(error), _truncate_middle(trace), tuple(runs))
        for (error, trace), runs in most[:MOST_REASONS]
    ]


def collect_unsuccessful_runs(rows: Sequence[Row], axes: Sequence[str], status: str) -> list[UnsuccessfulRun]:
    """Return the runs with this status."""
    names, found = find_varied_settings(rows, axes), []
    for row in rows:
        if row.status == status:
            epochs, loss, error, notes = "", "", "", tuple[str, ...]()
            if (outcome := row.outcome) is not None:
                loss, error = format_number(outcome.train_loss), format_number(outcome.train_error)
                epochs, notes = str(outcome.epochs), outcome.notes
            found.append(UnsuccessfulRun(row.key[:12], format_run_settings(row, names), epochs, loss, error, notes))
    return found


def format_run_settings(row: Row, names: Sequence[str]) -> str:
    """Return the varied settings of a run, in a line."""
    return ", ".join(f"{name} {format_setting(row.config.get(name))}" for name in names)


def format_run_name(row: Row, names: Sequence[str]) -> str:
    """Return the key of a run with its varied settings."""
    told = format_run_settings(row, names)
    return f"{row.key[:12]} ({told})" if told else row.key[:12]


def _truncate_middle(text: str) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= MOST_LETTERS:
        return text
    return (
        f"{text[: MOST_LETTERS // 3]}\n... {len(text) - MOST_LETTERS} characters ...\n{text[-2 * MOST_LETTERS // 3 :]}"
    )
