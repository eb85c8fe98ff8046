"""A study that is killed, again and again, loses nothing, repeats nothing, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def killed(folder: Path, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "killing.py", str(folder), *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_study_of_40_runs_survives_30_kills_at_random_moments(tmp_path: Path) -> None:
    found = killed(tmp_path, "moments", 0, 30)
    assert found["kills"] == 30
    assert found["lost"] == []
    assert found["twice"] == []
    assert found["torn"] == []
    assert found["differ"] == []
    # The kills met it in training, between weights and rows, and near its end: else this shows little.
    assert any(found["checkpoints at kills"])
    assert any(
        weights > finished for weights, finished in zip(found["weights at kills"], found["rows at kills"], strict=True)
    )
    assert max(found["rows at kills"]) >= 20


def test_a_kill_before_within_or_after_any_change_of_a_file_loses_nothing(tmp_path: Path) -> None:
    found = killed(tmp_path, "changes")
    # 4 rows, 4 weights, a checkpoint for each of 2 groups, the study and the table: each renamed into place, then more.
    assert found["kills"] >= 3 * (4 + 4 + 2 + 2)
    assert found["lost"] == []
    assert found["twice"] == []
    assert found["torn"] == []
    assert found["differ"] == []


def test_a_group_killed_between_its_weights_and_again_later_loses_nothing(tmp_path: Path) -> None:
    found = killed(tmp_path, "pairs")
    # One run had its row while the other was still to be trained from the checkpoint: else this shows little.
    assert found["partly done"] > 0
    assert found["lost"] == []
    assert found["twice"] == []
    assert found["torn"] == []
    assert found["differ"] == []
