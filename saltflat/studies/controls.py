"""What anyone could have looked at instead of a measure."""

from __future__ import annotations

import hashlib
from typing import Any

from saltflat.studies.row import Row

CONTROLS = ("parameters", "norm", "distance", "train_loss", "lr", "batch", "noise")


def compute_controls(row: Row) -> dict[str, float]:
    """Simple numbers of a run that a measure should do better than; those that are not known are left out.

    They are the number of parameters, the norm of the weights and their distance from initialisation, the training
    loss, the learning rate and the batch size. The last, ``noise``, is a number from 0 to 1 that depends on nothing
    but the run's key: what it scores is what chance scores.

    Example:
        >>> list(compute_controls(Row(key="a1", config={"lr": 0.1, "batch": 64}, status="failed")))
        ['lr', 'batch', 'noise']
    """
    found: dict[str, Any] = {}
    if row.outcome is not None:
        found |= {name: getattr(row.outcome, name) for name in ("parameters", "norm", "distance", "train_loss")}
    found |= {name: row.config.get(name) for name in ("lr", "batch")}
    found["noise"] = int.from_bytes(hashlib.sha256(row.key.encode()).digest()[:6], "big") / 2**48
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
