"""What one measurement in the middle of a training found."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "flatness"
EDGE_NAME = "lr_lambda_max"
THRESHOLD_NAME = "lr_lambda_max_threshold"  # beyond it the optimizer diverges on a parabola


def strip_prefix(name: str) -> str:
    """A name without its prefix.

    >>> strip_prefix("flatness/hessian_trace/0.weight")
    'hessian_trace/0.weight'
    """
    return name.split("/", 1)[-1]


class MonitorWarning(UserWarning):
    """Something about a measurement or a logger is not as it seems; the training goes on."""


@dataclass(frozen=True)
class Record:
    """Numbers of one moment; floats only, so a long history is small.

    Attributes:
        step: training steps done by then.
        epoch: epochs done by then.
        values: by name, such as ``"flatness/hessian_trace"``; nan where it could not be measured.
        seconds: how long it took.
        notes: what could not be measured, and why; and what there is to say of the values, when it is true first.
        skipped: the steps (or epochs, if it is measured by these) since the record before at which a measurement was
            due, and was not made then to keep below the cap.
    """

    step: int
    epoch: int
    values: Mapping[str, float]
    seconds: float
    notes: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()


class OneTimeWarnings:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def __call__(self, about: object, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warnings.warn(text, MonitorWarning, stacklevel=3)
