"""One run of a study: its settings, outcome and readings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from saltflat.results.report import Reading


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Losses are mean cross-entropies, errors fractions of wrong answers, both in eval mode and without augmentation.
    Those of the training set use the labels that the network was trained on.

    Attributes:
        status: ``"done"``; ``"missed"``, the targets were not met; or ``"diverged"``, the loss or a weight is not
            finite.
        epochs: number of epochs.
        train_loss, train_error, test_loss, test_error: values at the end; nan if the network diverged.
        train_examples, test_examples: number of examples.
        parameters: number of parameters.
        norm: Euclidean norm of all parameters.
        distance: Euclidean distance of all parameters from their initial values; None if these are not known.
        curve: mean loss over the steps of each epoch.
        notes: other remarks.
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
    """A trained network.

    Attributes:
        weights: its ``state_dict``, on the CPU.
        outcome: outcome of the training.
        seconds: duration of the training, divided by the number of networks that were trained together.
    """

    weights: dict[str, Tensor]
    outcome: Outcome
    seconds: float


STATUSES = ("done", "missed", "diverged", "failed")


@dataclass(frozen=True)
class Row:
    """One run: its settings, outcome and readings.

    Attributes:
        key: digest of its settings, and the name of its files.
        config: every setting by name, including the seed.
        status: ``"done"``, ``"missed"`` (the stopping rule), ``"diverged"`` (not finite) or ``"failed"`` (an error).
        outcome: losses, errors, norm; None if the training failed.
        readings: readings by measure; empty if nothing could be measured.
        measured: options of the measurement.
        failure: the error in one line and its traceback, of a failed run.
        seconds: duration of training and of measuring. Not in the study's table, which is reproducible byte for byte.
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
        """Test minus training value of the error and of the loss; empty if the run failed."""
        if self.outcome is None:
            return {}
        return {
            "error": self.outcome.test_error - self.outcome.train_error,
            "loss": self.outcome.test_loss - self.outcome.train_loss,
        }


CONTROLS = ("parameters", "norm", "distance", "train_loss", "lr", "batch_size", "noise")


def compute_controls(row: Row) -> dict[str, float]:
    """Return simple numbers of a run that a measure should beat; unknown ones are left out.

    They are the number of parameters, the norm of the weights and their distance from initialization, the training
    loss, the learning rate and the batch size. The last, ``noise``, is a number from 0 to 1 that depends only on the
    run's key: its score is that of chance.

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
