"""Runs that did not end well, with their reasons; equal reasons are told once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saltflat.report.html_page import format_setting
from saltflat.report.html_runs import find_varied_settings
from saltflat.report.text import format_number

if TYPE_CHECKING:
    from saltflat.studies.row import Row

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
    """A run that missed its target or diverged: its settings, how far it came, and what is noted."""

    run: str
    settings: str
    epochs: str
    train_loss: str
    train_error: str
    notes: tuple[str, ...]


def collect_failures(rows: Sequence[Row], axes: Sequence[str]) -> list[FailureGroup]:
    """Errors, those of most runs first."""
    names, found = find_varied_settings(rows, axes), dict[tuple[str, str], list[str]]()
    for row in rows:
        if row.status == "failed" or row.failure is not None:
            told = row.failure or {}
            reason = told.get("error") or "No reason was kept."
            found.setdefault((reason, told.get("traceback", "")), []).append(format_run_name(row, names))
    most = sorted(found.items(), key=lambda each: -len(each[1]))
    return [
        FailureGroup(_truncate_middle(error), _truncate_middle(trace), tuple(runs))
        for (error, trace), runs in most[:MOST_REASONS]
    ]


def collect_unsuccessful_runs(rows: Sequence[Row], axes: Sequence[str], status: str) -> list[UnsuccessfulRun]:
    """The runs that ended this way."""
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
    """The settings in which this run differs from others, in a line."""
    return ", ".join(f"{name} {format_setting(row.config.get(name))}" for name in names)


def format_run_name(row: Row, names: Sequence[str]) -> str:
    told = format_run_settings(row, names)
    return f"{row.key[:12]} ({told})" if told else row.key[:12]


def _truncate_middle(text: str) -> str:
    """The beginning and the end of what is too long to read."""
    if len(text) <= MOST_LETTERS:
        return text
    return f"{text[: MOST_LETTERS // 3]}\n... {len(text) - MOST_LETTERS} letters ...\n{text[-2 * MOST_LETTERS // 3 :]}"
