"""Whether a model's own loss, which is trained on, is the one that flatness is measured of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.loan import loan
from saltflat.problem import Problem, real

TOLERANCE = 1e-3  # relative; the model may take its own in a shorter precision
DO = (
    "Do: pass the loss= that the model takes itself; for language models that shift labels inside, give labels that "
    "are shifted already"
)


@dataclass(frozen=True)
class Losses:
    """Of the same examples in eval mode.

    Attributes:
        ours: as saltflat takes it.
        own: as the model does.
        unshifted: the model's own with labels one place later: that of labels that were shifted in advance.
    """

    ours: float
    own: float
    unshifted: float | None = None

    @property
    def agree(self) -> bool:
        return _same(self.ours, self.own)

    @property
    def agree_shifted(self) -> bool:
        return self.agree or (self.unshifted is not None and _same(self.ours, self.unshifted))


def losses(model: nn.Module, inputs: Any, labels: Any, loss: Any) -> Losses | None:
    """Both losses of some examples; None where they cannot be compared, or the model has none."""
    if not isinstance(inputs, Mapping) or not isinstance(labels, Tensor):
        return None
    config: Any = getattr(model, "config", None)
    kept = getattr(config, "problem_type", None)  # transformers sets it in the first pass with labels
    try:
        with loan(model, "eval"), torch.no_grad():
            own = _own(model, inputs, labels)
            if own is None:
                return None
            problem = Problem.of(model, (inputs, labels), loss)
            (batch,) = problem.batches()
            outputs, targets = problem.network(batch), real(batch.targets)
            problem.loss.check(outputs, targets)
            ours = problem.loss.total(outputs, targets).sum() / problem.loss.share(outputs, targets).sum()
            unshifted = None
            if labels.dim() == 2 and not labels.is_floating_point():
                first = torch.full_like(labels[:, :1], -100)
                unshifted = _own(model, inputs, torch.cat([first, labels[:, :-1]], dim=1))
    # Whatever is wrong is said where it is measured, or by the training itself.
    except (SaltflatError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    finally:
        if hasattr(config, "problem_type"):
            config.problem_type = kept
    found = Losses(float(ours), own, unshifted)
    return found if isfinite(found.ours) and isfinite(found.own) else None


def _own(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> float | None:
    outputs = model(**{**inputs, "labels": labels})
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple):
        found = outputs[0]
    return float(found) if isinstance(found, Tensor) and found.dim() == 0 else None


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
