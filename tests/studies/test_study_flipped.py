"""Any byte of any file of a study may be damaged: it is noticed and made again, or it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


# The full form is 100 flips in every region and all damages: python flipping.py FOLDER flips 0 100, and damages 0 0.
def test_damage_in_any_region_of_any_file_is_noticed_and_healed_or_harmless(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "flipping.py", str(tmp_path), "short", "0", "8"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 11
    assert {kind: each["wrong"] for kind, each in found.items() if each["wrong"]} == {}
    assert all(each.keys() <= {"noticed and healed", "harmless", "wrong"} for each in found.values())
    # Nearly all has to be noticed: else this shows little.
    assert sum(each.get("noticed and healed", 0) for each in found.values()) >= 15
