"""Every numbered example runs from start to end, as a user would run it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[0-9]*.py"))


def the_digits_are_reported(printed: str, out: Path) -> None:
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    networks = report["networks"]
    assert [network["random_labels"] for network in networks] == [0.0, 0.3, 0.0]
    for network in networks:
        assert network["network"] in printed
        assert 0 < network["curvature_trace"] < math.inf
        assert 0 < network["empirical_fisher_trace"] < math.inf
        assert network["certificate_holds"], "these are ReLU networks: their Gauss-Newton diagonal is the Hessian's"
        assert network["test_accuracy"] > 0.15, "no better than guessing"
        parts = network["per_parameter"].values()
        assert math.isclose(sum(part["curvature_trace"] for part in parts), network["curvature_trace"], rel_tol=1e-9)
    assert "rescaling weights" in printed
    assert [path.name for path in out.iterdir()] == ["report.json"], "temporary files were left behind"


# What each example must have printed and written.
CHECKS: dict[str, Callable[[str, Path], None]] = {"01_digits.py": the_digits_are_reported}


def test_every_example_has_a_check_and_every_check_an_example() -> None:
    assert {path.name for path in EXAMPLES} == set(CHECKS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_leaves_what_it_promises(path: Path, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(path), "--out", str(tmp_path)],
        env={**os.environ, "SALTFLAT_QUICK": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    CHECKS[path.name](finished.stdout, tmp_path)
