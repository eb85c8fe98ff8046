"""A row as strict JSON has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from saltflat.errors import StudyError
from saltflat.report.file import FileFormat
from saltflat.report.plain import decode_nonfinite, encode_key, encode_nonfinite
from saltflat.report.reading import Reading
from saltflat.studies.integrity import DIGEST, add_digest, check_digest
from saltflat.studies.row import STATUSES, Row
from saltflat.studies.trained import Outcome

ROW = FileFormat("saltflat.row/1", "a row of a study", "Study.run")
ENDS = ("done", "missed", "diverged")
COUNTS = ("epochs", "train_examples", "test_examples", "parameters")
NUMBERS = ("train_loss", "train_error", "test_loss", "test_error", "norm")
TUPLES = ("curve", "notes")


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.report.plain``."""
    return {each.name: encode_nonfinite(getattr(outcome, each.name)) for each in fields(outcome)}


def outcome_from_dict(given: Mapping[str, Any]) -> Outcome:
    """The outcome that ``outcome_to_dict`` was called on."""
    values: dict[str, Any] = {key: decode_nonfinite(value) for key, value in given.items()}
    values = {key: tuple(value) if key in TUPLES else value for key, value in values.items()}
    found = Outcome(**values)
    numbers = [*(values[name] for name in NUMBERS), *found.curve, *([] if found.distance is None else [found.distance])]
    if (
        found.status not in ENDS
        or not all(type(values[name]) is int for name in COUNTS)
        or not all(type(each) in (int, float) for each in numbers)
        or not all(isinstance(note, str) for note in found.notes)
    ):
        raise TypeError("a field of the outcome has a value of another kind")
    return found


def row_to_dict(row: Row) -> dict[str, Any]:
    """As strict JSON has it, with a digest of all of it: scores believe a row, so nobody should have edited it."""
    plain = {
        "schema": ROW.schema,
        "key": row.key,
        "status": row.status,
        "config": encode_nonfinite(row.config),
        "outcome": None if row.outcome is None else outcome_to_dict(row.outcome),
        "readings": {encode_key(name): reading.to_dict() for name, reading in row.readings.items()},
        "measured": encode_nonfinite(row.measured),
        "failure": encode_nonfinite(row.failure),
        "seconds": encode_nonfinite(row.seconds),
        "made_with": encode_nonfinite(row.made_with),
    }
    return add_digest(plain)


def row_from_dict(given: Mapping[str, Any]) -> Row:
    """The row that ``row_to_dict`` was called on."""
    try:
        check_digest(given)
        readings = {name.removeprefix("$"): Reading.from_dict(each) for name, each in given["readings"].items()}
        rest = {
            key: decode_nonfinite(given[key]) for key in ("key", "status", "config", "measured", "failure", "seconds")
        }
        outcome = None if given["outcome"] is None else outcome_from_dict(given["outcome"])
        row = Row(**rest, outcome=outcome, readings=readings, made_with=decode_nonfinite(given["made_with"]))
        # Reading is lenient: what does not come out again as it went in was not written by us.
        tables = (row.config, row.measured, row.seconds, row.made_with, row.failure or {})
        again = {key: value for key, value in row_to_dict(row).items() if key != DIGEST or key in given}
        if again != given or row.status not in STATUSES or not all(isinstance(t, dict) for t in tables):
            raise TypeError("a field has a value of another kind")
        _check_row_types(row)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
        raise StudyError(
            f"Got a row that cannot be understood ({type(problem).__name__}: {problem}). Want what Study.run wrote. "
            "Do: let the study make it again."
        ) from problem
    return row


def _check_row_types(row: Row) -> None:
    """Raise where something is no number that scores and pages compute with, or no text that they print."""
    texts: list[Any] = [] if row.failure is None else [row.failure["error"], *row.failure.values()]
    numbers: list[Any] = list(row.seconds.values())
    if row.outcome is not None:
        own = {each.name: getattr(row.outcome, each.name) for each in fields(row.outcome)}
        texts += [own.pop("status"), *own.pop("notes")]
        numbers += own.pop("curve")
        numbers += [value for name, value in own.items() if not (name == "distance" and value is None)]
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("a text is of another kind")
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
        raise TypeError("a number is of another kind")
    for each in (*numbers, *row.config.values()):
        if isinstance(each, int):
            float(each)  # raises where there is no such float
