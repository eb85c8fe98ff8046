"""What a training leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
