"""A report as a tidy table of pandas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from saltflat.report.optional import import_optional
from saltflat.report.reading import Reading

# The layer's name in the row of the whole network.
TOTAL = ""


def build_frame_rows(readings: Iterable[Reading]) -> Iterator[dict[str, Any]]:
    """One row per measure and layer, that of the whole network first."""
    for reading in readings:
        shared = {"exact": reading.exact, "converged": reading.converged}
        parts = {TOTAL: reading.value, **reading.layers}
        errors = {TOTAL: reading.stderr, **reading.layer_stderr}
        for layer, value in parts.items():
            error = errors.get(layer)
            stderr = float("nan") if error is None else error
            yield {"measure": reading.name, "layer": layer, "value": value, "stderr": stderr, **shared}


def build_frame(rows: Iterable[dict[str, Any]], columns: list[str]) -> Any:
    """A ``pandas.DataFrame`` of the rows; the columns are there even where no row is."""
    return import_optional("pandas", "to_frame()").DataFrame(list(rows), columns=columns)
