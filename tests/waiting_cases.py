"""A network that waits once in the middle of its training, to be killed there; and a train function that uses it."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

import study_cases
import torch
from torch import Tensor, nn

from saltflat.studies import Examples

FOLDER = "STUDY_WAITS_IN"  # the environment says where to leave the number of the process; without it nobody waits
STEPS = 18  # that a process takes before it waits: 8 to see whether networks can be stacked, then two epochs and a half
PATIENCE = 60.0

_taken = count(1)


class Waiting(nn.Module):
    """Does nothing to its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and FOLDER in os.environ:
            folder = Path(os.environ[FOLDER])
            if next(_taken) == STEPS and _first(folder / "begun"):
                (folder / f"pid-{os.getpid()}").touch()
                time.sleep(PATIENCE)
        return inputs


def _first(path: Path) -> bool:
    """Whether this is the only process that made the file, however many try."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def network(shape: tuple[int, ...], classes: int, width: int = 2) -> nn.Module:
    return nn.Sequential(Waiting(), study_cases.network(shape, classes, width))


def train(*, seed: int, data: Examples, width: int, epochs: int, lr: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """Full-batch gradient descent from the seed that the study sets."""
    model = network(data.shape, data.classes, width).train()
    initial = {name: each.clone() for name, each in model.state_dict().items()}
    assert torch.get_num_threads() == 1
    return study_cases.trained(model, data, epochs, lr), initial
