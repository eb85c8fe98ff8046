"""The benchmark of scaling runs, goes on where it stopped, and fits exponents with intervals that cover."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent.parents[1] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("scaling")


def test_it_measures_every_size_once_and_draws(scaling: Any, tmp_path: Path) -> None:
    rows, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    words = ["--scale", "smoke", "--repeats", "1", "--out", str(rows), "--axes", "classes"]
    words += ["--competitors", *scaling.SALTFLAT]
    scaling.main([*words, "--plot", str(plot)])
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["axis"], row["size"], row["competitor"]) for row in found] == [
        ("classes", size, name) for name in scaling.SALTFLAT for size in (5, 10, 20)
    ]
    assert all(row["cpu_seconds"] > 0 and row["repeats"] == 1 for row in found)
    assert plot.stat().st_size > 10_000
    # A row that was cut off while it was written is measured again, and so is one whose peer was absent; no other is.
    kept = [{**row, "cpu_seconds": 7.0} for row in found]
    kept[0] = {key: kept[0][key] for key in ("axis", "size", "competitor", "device")}
    kept[0]["reason"] = "ModuleNotFoundError: No module named 'saltflat'"
    rows.write_text("".join(json.dumps(row) + "\n" for row in kept)[:-2])
    scaling.main(words)
    again = [json.loads(line) for line in rows.read_text().splitlines()]
    new = {(row["axis"], row["size"], row["competitor"]) for row in again if row["cpu_seconds"] != 7.0}
    assert new == {("classes", 5, "saltflat"), ("classes", 20, "saltflat sampled:4")}
    assert len(again) == len(found)


def test_a_fit_finds_the_exponent_and_its_interval_covers(scaling: Any) -> None:
    exact = scaling.fit_exponent([1, 10, 100, 1000], [3.0, 30.0, 3000.0, 300_000.0])
    assert exact.low < 1.5 < exact.high
    line = scaling.fit_exponent([1, 10, 100, 1000, 10_000], [50.0, 2.0, 20.0, 200.0, 2000.0])
    assert line.exponent == pytest.approx(1.0)  # of the four largest
    assert line.high - line.low < 1e-6
    assert scaling.fit_exponent([1, 10], [1.0, 2.0]) is None
    noise = np.random.default_rng(0)
    sizes = [10.0, 100.0, 1000.0, 10_000.0]
    fits = [scaling.fit_exponent(sizes, [s**1.3 * np.exp(0.2 * noise.normal()) for s in sizes]) for _ in range(400)]
    assert 0.92 < np.mean([fit.low < 1.3 < fit.high for fit in fits]) < 0.98


def test_a_series_ends_before_a_call_that_would_take_too_long(scaling: Any) -> None:
    def row(size: int, seconds: float) -> dict[str, Any]:
        return {"size": size, "cpu_seconds": seconds, "device": "cpu", "extra_mib": 1.0}

    assert scaling.predict_end([], 10**9) == ""
    assert scaling.predict_end([row(1, 1.0)], 10) == ""
    assert scaling.predict_end([row(1, 0.1), row(10, 10.0)], 100) == "not run: about 1,000 s"
    assert scaling.predict_end([{"size": 1, "reason": "no such peer"}], 2) == "no such peer"
