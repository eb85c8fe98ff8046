"""Results of studies that were never run, whose measures and errors are functions of the settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from saltflat.results.report import Reading
from saltflat.studies import Results, Study
from saltflat.studies.grid import iter_grid_points
from saltflat.studies.row import Outcome, Row

AXES: dict[str, list[Any]] = {"lr": [0.1, 0.2, 0.4], "width": [8, 16], "optimizer": ["sgd", "adam"]}
Place = dict[str, Any]


def made_study(
    value: Callable[[Place], float | None],
    axes: dict[str, list[Any]] | None = None,
    seeds: int = 3,
    status: Callable[[Place], str] = lambda place: "done",
    error: Callable[[Place], float] = lambda place: 0.25,
) -> Results:
    """A study whose measure ``hessian_trace`` is this function of the settings; without a row where it is None."""
    study = Study("made", data="digits", axes=AXES if axes is None else axes, seeds=seeds, measures=["hessian_trace"])
    places = {f"run{place:04d}": point for place, point in enumerate(iter_grid_points(study))}
    rows = {}
    for key, place in places.items():
        number, ended = value(place), status(place)
        if number is None:
            continue
        outcome = Outcome(ended, 5, 0.01, 0.0, 0.01 + error(place), error(place), 900, 450, 100, 3.0, 2.0)
        readings = {"hessian_trace": Reading("hessian_trace", number)} if ended in ("done", "missed") else {}
        rows[key] = Row(key, place, ended, None if ended == "failed" else outcome, readings)
    return Results(study, rows, Path("nowhere"), places)


def drawn(place: Place, spread: float = 0.3, seed: int = 0) -> float:
    """A positive number that depends on all settings and is different in every run."""
    noise = np.random.default_rng([seed, *map(ord, repr(sorted(place.items())))]).normal()
    return float(np.exp(math.log(place["lr"]) + 0.1 * place["width"] + spread * noise))
