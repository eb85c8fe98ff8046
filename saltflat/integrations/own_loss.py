"""Whether a model's own loss, which is trained on, is the one that flatness is measured of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.loan import open_session
from saltflat.model_loss import compute_model_loss
from saltflat.problem import Problem, cast_targets

TOLERANCE = 1e-3  # relative; the model may take its own in a shorter precision


@dataclass(frozen=True)
class LossComparison:
    """Of the same examples in eval mode.

    Attributes:
        ours: as saltflat takes it.
        own: as the model does.
    """

    ours: float
    own: float

    @property
    def is_close(self) -> bool:
        return abs(self.ours - self.own) <= TOLERANCE * max(abs(self.ours), abs(self.own))


def compare_losses(model: nn.Module, inputs: Any, labels: Any, loss: Any) -> LossComparison | None:
    """Both losses of some examples; None where they cannot be compared, or the model has none."""
    if not isinstance(inputs, Mapping) or not isinstance(labels, Tensor):
        return None
    try:
        with open_session(model, "eval"), torch.no_grad():
            own = compute_model_loss(model, (), inputs, labels)
            if own is None:
                return None
            problem = Problem.build(model, (inputs, labels), loss)
            (batch,) = problem.read_batches()
            outputs, targets = problem.network(batch), cast_targets(batch.targets)
            problem.loss.check(outputs, targets)
            ours = problem.loss.total(outputs, targets).sum() / problem.loss.share(outputs, targets).sum()
    # Whatever is wrong is said where it is measured, or by the training itself.
    except (SaltflatError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    found = LossComparison(float(ours), own)
    return found if isfinite(found.ours) and isfinite(found.own) else None
