"""The first use of the package in a program."""

from __future__ import annotations

import subprocess
import sys


def test_loading_the_package_draws_no_random_numbers() -> None:
    script = "import random, saltflat; before = random.getstate(); saltflat.measure; print(before == random.getstate())"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert finished.stdout == "True\n"
