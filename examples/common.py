"""What several examples share: their arguments, and a plain training loop."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE = 64
LEARNING_RATE = 3e-3


def parse_arguments(description: str | None, quick: str, seed: str) -> tuple[Path, int]:
    """Return the folder for the results, which exists and can be written to, and the seed.

    Args:
        description: printed by ``--help``.
        quick: what ``SALTFLAT_QUICK=1`` changes.
        seed: what is drawn with the seed.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"With SALTFLAT_QUICK=1 in the environment {quick}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {seed} (default: %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    try:  # now, not after all the work
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        parser.error(f"Expected a folder to write to, but got --out {out} ({error.strerror}). Try another folder.")
    return out, arguments.seed


def train(model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, seed: int) -> None:
    """Train a model with Adam; the seed determines the order of the examples."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
