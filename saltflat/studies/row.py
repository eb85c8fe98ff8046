"""One run of a study: how its training ended, and all that is known of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from saltflat.results.report import Reading


@dataclass(frozen=True)
class Outcome:
    """How a training ended. Losses are mean cross-entropies, errors shares of wrong answers, both in eval mode, on
    examples as they are (not augmented); on the training side with the labels the network was trained on.

    Attributes:
        status: ``"done"``; ``"missed"``, the targets of the stopping rule were not met; or ``"diverged"``, the loss or
            a weight was no longer finite.
        epochs: taken.
        train_loss, train_error, test_loss, test_error: at the end; nan where the network diverged.
        train_examples, test_examples: how many of each.
        parameters: how many numbers were trained.
        norm: Euclidean, of all parameters together.
        distance: Euclidean, of all parameters from their values before training; None where those are not known.
        curve: mean loss over the steps of each epoch, as training saw it.
        notes: what a reader should know besides.
    """

    status: str
    epochs: int
    train_loss: float
    train_error: float
    test_loss: float
    test_error: float
    train_examples: int
    test_examples: int
    parameters: int
    norm: float
    distance: float | None
    curve: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainedNetwork:
    """A network at the end of its training: its ``state_dict`` on the CPU, how it ended, and what it took.

    Attributes:
        weights: by the network's own names.
        outcome: how the training ended.
        seconds: of training, divided by the number of networks that were trained together.
    """

    weights: dict[str, Tensor]
    outcome: Outcome
    seconds: float


STATUSES = ("done", "missed", "diverged", "failed")


@dataclass(frozen=True)
class Row:
    """One run: what it was asked to do, how it ended, and what was measured.

    Attributes:
        key: the hash of its configuration, and the name of its files.
        config: every setting by name, the seed among them.
        status: ``"done"``, ``"missed"`` (the stopping rule), ``"diverged"`` (not finite) or ``"failed"`` (an error).
        outcome: losses, errors, norm; None where the run failed in training.
        readings: by measure; empty where nothing could be measured.
        measured: with what settings they were taken.
        failure: the error in one line and its traceback, of a failed run.
        seconds: of training and of measuring. Not part of the study's table, which two runs share byte for byte.
        made_with: versions and device.
    """

    key: str
    config: Mapping[str, Any]
    status: str
    outcome: Outcome | None = None
    readings: Mapping[str, Reading] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    failure: Mapping[str, str] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)

    @property
    def gap(self) -> dict[str, float]:
        """Test minus training, of the error and of the loss; empty where the run failed."""
        if self.outcome is None:
            return {}
        return {
            "error": self.outcome.test_error - self.outcome.train_error,
            "loss": self.outcome.test_loss - self.outcome.train_loss,
        }


CONTROLS = ("parameters", "norm", "distance", "train_loss", "lr", "batch_size", "noise")


def compute_controls(row: Row) -> dict[str, float]:
    """Simple numbers of a run that a measure should do better than; those that are not known are left out.

    They are the number of parameters, the norm of the weights and their distance from initialisation, the training
    loss, the learning rate and the batch size. The last, ``noise``, is a number from 0 to 1 that depends on nothing
    but the run's key: what it scores is what chance scores.

    Example:
        >>> list(compute_controls(Row(key="a1", config={"lr": 0.1, "batch_size": 64}, status="failed")))
        ['lr', 'batch_size', 'noise']
    """
    found: dict[str, Any] = {}
    if row.outcome is not None:
        found |= {name: getattr(row.outcome, name) for name in ("parameters", "norm", "distance", "train_loss")}
    found |= {name: row.config.get(name) for name in ("lr", "batch_size")}
    found["noise"] = int.from_bytes(hashlib.sha256(row.key.encode()).digest()[:6], "big") / 2**48
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
