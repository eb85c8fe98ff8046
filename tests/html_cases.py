"""Studies and reports made by hand, to be shown as pages."""

from __future__ import annotations

import math
import random
from typing import Any

from saltflat.results import Reading, Report
from saltflat.studies.row import Outcome, Row

AXES = ("lr", "batch_size", "widths")
# What a name could try: to end the script, to load something, to run something, to break lines of JavaScript.
HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=2</script><!--&amp;\u2028\'`${1}'
NAN = float("nan")


def row(key: str, config: dict[str, Any], gap: float, readings: dict[str, float], **changes: Any) -> Row:
    """A finished run of 450 test examples, with this gap in error."""
    status = changes.pop("status", "done")
    outcome = Outcome(status, 60, 0.02, 0.0, 0.32 + gap, gap, 1347, 450, 5000, 20.0, 12.0)
    measured = {name: Reading(name, value) for name, value in readings.items()}
    given: dict[str, Any] = {
        "outcome": outcome,
        "readings": measured,
        "measured": {"examples": 1347},
        "seconds": {"training": 1.5},
        "made_with": {"saltflat": "0.1.0", "torch": "2.6.0"},
        **changes,
    }
    return Row(key, config, status, **given)


def failed(key: str, config: dict[str, Any], error: str) -> Row:
    trace = f"Traceback (most recent call last):\n  line 3\n{error}"
    return Row(key, config, "failed", failure={"error": error, "traceback": trace})


def study(seeds: int = 4, measures: int = 5, hostile: bool = True) -> list[Row]:
    """12 configurations: ``good`` follows the gap closely, the others less and less, the last has a hostile name.

    Run 5 missed the stopping rule, run 7 diverged, runs 9 and 10 failed with one error.
    """
    draw, found = random.Random(0), list[Row]()
    names = ["good", *(f"measure_{k}(p={k})" for k in range(measures - 2)), HOSTILE if hostile else "last"]
    for lr in (0.01, 0.03, 0.1):
        for batch in (16, 64):
            for width in (32, 128):
                for seed in range(seeds):
                    key = f"{draw.getrandbits(64):016x}"
                    config = {"network": "mlp", "widths": [width, width], "lr": lr, "batch_size": batch, "seed": seed}
                    gap = 0.1 + 0.03 * math.log10(batch) - 0.05 * math.log10(lr) + draw.gauss(0, 0.01)
                    place = len(found)
                    if place in (9, 10):
                        found.append(failed(key, config, f"RuntimeError: {HOSTILE}"))
                        continue
                    if place == 7:
                        lost = Outcome("diverged", 7, NAN, NAN, NAN, NAN, 1347, 450, 5000, NAN, NAN)
                        found.append(Row(key, config, "diverged", lost))
                        continue
                    values = {
                        name: math.exp(20 * gap + draw.gauss(0, 0.1 + k)) * 10.0 ** (k - 1)
                        for k, name in enumerate(names)
                    }
                    found.append(row(key, config, gap, values, status="missed" if place == 5 else "done"))
    return found


def report(**changes: Any) -> Report:
    readings = [
        Reading("trace", 3.0, layers={"0.weight": 1.0, "2.weight": 2.0}, units={}),
        Reading("rho", 12.5, {"0.weight": 0.01, "2.weight": 12.49}, stderr=0.5, exact=False, notes=("A search.",)),
        Reading("signed", -1.0, {"0.weight": -2.0, "2.weight": 1.0}),
        Reading("lost", NAN, {"0.weight": NAN}, notes=("All weights are zero.",)),
        Reading(HOSTILE, 1.0, {HOSTILE: 1.0}, notes=(HOSTILE,)),
    ]
    given: dict[str, Any] = {
        "readings": {reading.name: reading for reading in readings},
        "left_out": {"distance": f"it needs initial=. {HOSTILE}"},
        "legend": {
            reading.name: {"meaning": f"How sharp. {HOSTILE}", "formula": "tr H", "invariant_to": ["layer_scale"]}
            for reading in readings
        },
        "model": f"Net, 1234 parameters {HOSTILE}",
        "examples": 100,
        "loss": 0.25,
        "settings": {"columns": "exact", "dtype": "float64", "loss": "cross_entropy", HOSTILE: HOSTILE},
        "versions": {"saltflat": "0.1.0", "torch": "2.6.0"},
        "device": "cpu",
        "seconds": 1.5,
        "seconds_by_step": {"sweep": 1.25},
        "certificate": {"holds": True, "gap": 1e-12, "examples": 8, "gaps": {"0.weight": 1e-12}},
        "notes": ("Measured in eval mode.", HOSTILE),
        "created": "2025-01-31T12:00:00+00:00",
    }
    return Report(**{**given, **changes})
