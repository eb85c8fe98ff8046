"""All runs of a study as one table: the same numbers give the same bytes, whatever happened on the way."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from saltflat.studies.row import Row

OUTCOME = ("epochs", "train_loss", "train_error", "test_loss", "test_error")
GAPS = ("error", "loss")
# What a spreadsheet takes for the beginning of a formula.
EXECUTED = ("=", "+", "-", "@", "\t", "\r", "\n")
SIZES = ("parameters", "norm", "distance")


def build_table(
    rows: Mapping[str, Row], places: Mapping[str, Mapping[str, Any]], axes: Sequence[str], measures: Sequence[str]
) -> list[dict[str, Any]]:
    """One line per run, in the order of the grid; what is not known is None.

    Args:
        rows: of the runs that are finished, by key.
        places: for every run of the grid its values on the axes, and its seed.
        axes: their names, the first columns.
        measures: their names, the last columns.
    """
    lines = []
    for key, place in places.items():
        row = rows.get(key)
        outcome, gap = (None, {}) if row is None else (row.outcome, row.gap)
        readings = {} if row is None else row.readings
        lines.append(
            {
                "key": key,
                **{axis: place[axis] for axis in axes},
                "seed": place["seed"],
                "status": "missing" if row is None else row.status,
                **{name: getattr(outcome, name, None) for name in OUTCOME},
                **{f"gap_{name}": gap.get(name) for name in GAPS},
                **{name: getattr(outcome, name, None) for name in SIZES},
                **{name: readings[name].value if name in readings else None for name in measures},
            }
        )
    return lines


def format_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table as comma-separated values; every float with the digits that give it back.

    A text that a spreadsheet would execute as a formula gets an apostrophe in front.

    Example:
        >>> format_csv([{"key": "a", "lr": 0.1, "widths": [64, 32], "gap": None}])
        'key,lr,widths,gap\\na,0.1,"[64, 32]",\\n'
        >>> print(format_csv([{"lr": -0.1, "note": "-0.1", "network": "=1+1"}]), end="")
        lr,note,network
        -0.1,-0.1,'=1+1
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")  # else it would not quote a cell with "\r", a new line for others
    for cells in [list(lines[0]), *(line.values() for line in lines)] if lines else []:
        writer.writerow([_format_csv_cell(value) for value in cells])
        text.seek(text.tell() - len("\r\n"))
        text.truncate()
        text.write("\n")
    return text.getvalue()


def _format_csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)
    if not isinstance(value, str):
        return json.dumps(value)
    return f"'{value}" if value.startswith(EXECUTED) and not _is_number_text(value) else value


def _is_number_text(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and text.isascii() and text == text.strip()
    except ValueError:
        return False
