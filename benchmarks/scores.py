"""Measure the time and memory of scoring a study: loading its rows, all scores, the table and the page."""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from saltflat.measures.registry import MEASURES
from saltflat.results.report import Reading
from saltflat.studies import Results, Study
from saltflat.studies.grid import iter_grid_points
from saltflat.studies.row import Outcome, Row
from saltflat.studies.store.folder import DEFINITION, ROWS, STUDY
from saltflat.studies.store.rows import row_to_dict

# By the number of rows, how many values each of six axes has; the grid is a little larger where no product is as large.
GRIDS = {
    12: (2, 2, 2, 2, 1, 1),
    300: (3, 3, 3, 3, 2, 2),
    1_000: (4, 4, 4, 4, 2, 2),
    3_000: (4, 4, 4, 4, 4, 3),
    10_000: (5, 5, 5, 5, 4, 4),
}
AXES = ("lr", "batch_size", "weight_decay", "momentum", "width", "label_noise")
# Seconds of processor time and bytes that all scores of the largest study may take.
MOST_SECONDS, MOST_MEMORY = 60.0, 2 * 10**9


def make_study(folder: Path, rows: int, measures: int, seed: int = 0) -> None:
    """Write a study with this many finished runs; gaps (with ties) and measures depend on settings and chance."""
    draw = np.random.default_rng(seed)
    axes = {name: [0.01 * (1 + k) for k in range(count)] for name, count in zip(AXES, GRIDS[rows], strict=True)}
    names = sorted(MEASURES)[:measures]
    study = Study("scores", "digits", axes, stop={"epochs": 5}, measures=names)
    places = list(iter_grid_points(study))
    keys = [f"{run:016x}" for run in range(len(places))]
    levels = np.array(list(product(*(range(len(values)) for values in axes.values()))), dtype=np.float64)
    gaps = np.clip(0.3 + 0.02 * levels @ draw.normal(size=6) + 0.03 * draw.normal(size=len(levels)), 0, 1).round(4)
    values = {
        name: np.exp(
            draw.uniform(-3, 6) * gaps + 0.1 * levels @ draw.normal(size=6) + 0.2 * draw.normal(size=len(levels))
        )
        for name in names
    }
    (folder / ROWS).mkdir(parents=True)
    content = {"schema": STUDY.schema, "study": study.to_dict(), "data": {}, "keys": keys}
    (folder / DEFINITION).write_text(json.dumps(content), encoding="utf-8")
    for run in draw.permutation(len(places))[:rows]:
        gap, loss = float(gaps[run]), float(draw.uniform(0.01, 0.02))
        outcome = Outcome(
            status="done",
            epochs=5,
            train_loss=loss,
            train_error=0.0,
            test_loss=loss + 2 * gap,
            test_error=gap,
            train_examples=50_000,
            test_examples=10_000,
            parameters=10_000 + int(levels[run, 4]),
            norm=float(draw.uniform(10, 20)),
            distance=float(10 * gap + draw.uniform(0, 5)),
        )
        readings = {name: Reading(name, float(each[run])) for name, each in values.items()}
        row = Row(keys[run], places[run], "done", outcome, readings)
        (folder / ROWS / f"{keys[run]}.json").write_text(json.dumps(row_to_dict(row), indent=1), encoding="utf-8")


def steps(folder: Path) -> dict[str, dict[str, float]]:
    """Return the wall-clock and CPU seconds of each step, and the peak memory at its end."""
    found: dict[str, dict[str, float]] = {"start": {"memory": _peak()}}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        result = step()
        seconds = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
        found[name] = {**seconds, "memory": _peak()}
        return result

    results: Results = timed("load", lambda: Results.load(folder))
    timed("scores", lambda: results.scores("error"))
    timed("table", results.csv)
    page: Path = timed("page", lambda: results.write_html(folder / "page.html"))
    found["page"]["bytes"] = page.stat().st_size
    return found


def run(rows: int, measures: int, folder: Path) -> dict[str, Any]:
    """Run the steps of one study in a separate process, so that no other memory is counted."""
    make_study(folder, rows, measures)
    command = [sys.executable, __file__, "--steps", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {"rows": rows, "measures": measures, "steps": json.loads(done.stdout)}


def shown(found: Sequence[dict[str, Any]]) -> Table:
    table = Table("rows", "measures", "step", "seconds", "of the processor", "peak memory, MB", "size, MB")
    for each in found:
        for name, step in each["steps"].items():
            if name != "start":
                numbers = [f"{step[kind]:.1f}" for kind in ("seconds", "processor_seconds")]
                size = f"{step['bytes'] / 1e6:.1f}" if "bytes" in step else ""
                table.add_row(
                    f"{each['rows']:,}", str(each["measures"]), name, *numbers, f"{step['memory'] / 1e6:.0f}", size
                )
    return table


def _peak() -> float:
    # Linux counts in kibibytes, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, choices=list(GRIDS), default=[300, 1_000, 3_000, 10_000])
    parser.add_argument("--measures", type=int, default=30, help="besides the seven controls")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--steps", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.steps:
        print(json.dumps(steps(given.steps)))
        return
    found = []
    for rows, measures in [(12, 2)] if given.quick else [(rows, given.measures) for rows in given.rows]:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run(rows, measures, Path(folder) / "study"))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(shown(found))
    largest = next((each["steps"]["scores"] for each in found if each["rows"] == 10_000), None)
    if largest:
        reached = largest["processor_seconds"] < MOST_SECONDS and largest["memory"] < MOST_MEMORY
        console.print(f"All scores of 10,000 rows within 60 s and 2 GB: {'reached' if reached else 'NOT REACHED'}.")
    if given.out:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        about = {"python": platform.python_version(), "numpy": np.__version__, "OMP_NUM_THREADS": threads}
        given.out.write_text(json.dumps(about | {"studies": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
