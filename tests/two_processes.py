"""Run scripts as two processes, started the way their host library does."""

import os
import subprocess
import sys
from pathlib import Path

BY_TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc_per_node=2",
    "--master_port=0",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
)


def run_as_two(script: str, folder: Path, launcher: tuple[str, ...] = ()) -> None:
    """Run a script, which can import tests of integrations, with ``folder`` as its argument.

    Without a launcher the script starts the second process itself, as Lightning's Trainer does.
    """
    path = folder / "train.py"
    path.write_text(script, encoding="utf-8")
    tests = Path(__file__).parent
    known = [str(tests / "integrations"), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, str(path), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(known)},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
