"""Studies of 300 runs whose scores are on record in ``scores_300.json``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from saltflat.results.report import Reading
from saltflat.studies.row import Outcome, Row

AXES = ("lr", "batch_size", "weight_decay", "width", "depth", "dropout")
# By name: values of each axis, seeds, digits of the gaps, whether runs are lost, and the options of the scores.
STUDIES: dict[str, tuple[tuple[int, ...], int, int, bool, dict[str, Any]]] = {
    "six axes with ties": ((3, 3, 3, 3, 2, 2), 1, 2, False, {}),
    "runs lost and values missing": ((4, 4, 5), 4, 4, True, {"missed": "keep"}),
    "several seeds, losses": ((3, 3, 3, 3), 4, 3, False, {"gap": "loss", "seed": 3}),
    "one axis": ((8,), 40, 4, False, {}),
    "one configuration": ((1,), 300, 4, False, {}),
}


def study_rows(name: str, most: int = 300) -> list[Row]:
    """Runs on a grid, the gap and most measures drawn such that they depend on the settings and on each other."""
    shape, seeds, digits, lossy, _ = STUDIES[name]
    draw = np.random.default_rng(len(name))
    grid = list(product(*map(range, shape), range(seeds)))
    grid = [grid[place] for place in np.sort(draw.permutation(len(grid))[:most])]
    settings = np.array(grid, dtype=np.float64)[:, :-1]
    gaps = 0.3 + 0.02 * settings @ draw.normal(size=len(shape)) + 0.03 * draw.normal(size=len(grid))
    gaps = np.clip(gaps, 0, 1).round(digits)
    values = {
        "close": gaps + 0.01 * draw.normal(size=len(grid)),
        "far": np.exp(-10 * gaps + settings @ draw.normal(size=len(shape)) + draw.normal(size=len(grid))),
        "tied": (gaps + 0.05 * draw.normal(size=len(grid))).round(1),
        "flat": np.full(len(grid), 2.0),
        "outlier": np.where(np.arange(len(grid)) == 7, 1e12, 1 + 1e-6 * draw.random(len(grid))),
        "holes": np.where(draw.random(len(grid)) < 0.2, math.nan, draw.normal(size=len(grid)) - gaps),
        "few": np.where(np.arange(len(grid)) < 4, draw.random(len(grid)), math.inf),
    }
    ends = draw.choice(["done", "missed", "diverged", "failed"], size=len(grid), p=[0.8, 0.1, 0.05, 0.05])
    status = [str(end) for end in ends] if lossy else ["done"] * len(grid)
    return [
        _row(run, place, float(gaps[run]), status[run], {key: float(each[run]) for key, each in values.items()})
        for run, place in enumerate(grid)
    ]


def _row(run: int, place: Sequence[int], gap: float, status: str, values: dict[str, float]) -> Row:
    config = {axis: 0.1 * (1 + level) for axis, level in zip(AXES, place[:-1], strict=False)} | {"seed": place[-1]}
    ended = math.nan if status == "diverged" else gap
    outcome = Outcome(
        status=status,
        epochs=5,
        train_loss=0.01 + 0.001 * (run % 7),
        train_error=0.0,
        test_loss=0.1 + ended**2,
        test_error=ended,
        train_examples=1000,
        test_examples=(500, 10_000)[run % 2],
        parameters=100 * (1 + place[0]),
        norm=3.0 + (run % 11),
        distance=1.0 + gap,
    )
    readings = {name: Reading(name, value) for name, value in values.items()}
    return Row(f"run{run:04d}", config, status, None if status == "failed" else outcome, readings)


def numbers_of(name: str, score: Any) -> dict[str, dict[str, Any]]:
    """By measure, every number of its scores; what is undefined is left out."""
    options = STUDIES[name][-1]
    scores = score(study_rows(name), AXES[: len(STUDIES[name][0])], **options)
    found = {}
    for each in scores.scores.values():
        numbers = {key: value for key, value in each.to_dict().items() if isinstance(value, float)}
        by_axis = {f"granulated {key}": value for key, value in each.granulated_by_axis.items()}
        by_set = {f"cmi {key}": value for key, value in each.cmi_by_set.items()}
        ends = {f"{key} {end}": value for key, both in each.intervals.items() for end, value in enumerate(both)}
        known = {**numbers, **by_axis, **by_set, **ends}
        found[each.name] = {key: value for key, value in known.items() if not math.isnan(value)} | {"runs": each.runs}
    return found
