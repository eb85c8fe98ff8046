"""Losses in [0, 1] of a classifier, whose mean is bounded: the 0-1 error and the clipped cross-entropy."""

from __future__ import annotations

from math import log
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from saltflat.engine.losses import BinaryCrossEntropy, CrossEntropy, Loss, find_hits
from saltflat.engine.problem import cast_targets
from saltflat.errors import LabelError, OptionError
from saltflat.validation import is_choice

# A loss in [0, 1] whose mean is the risk.
BoundedLoss: TypeAlias = Literal["error", "clipped_cross_entropy"]

LEAST_PROBABILITY = 1e-5  # cross-entropy is clipped at its negative logarithm


def check_bounded_loss(kind: str, loss: Loss) -> None:
    """Check that this loss in [0, 1] is defined for a network that was trained with the other loss."""
    if not is_choice(kind, get_args(BoundedLoss)):
        known = " or ".join(map(repr, get_args(BoundedLoss)))
        raise OptionError(
            f"Expected a loss in [0, 1], {known}, but got {kind!r}, for which no bound holds. Try 'error'."
        )
    inner = getattr(loss, "inner", loss)
    if not isinstance(inner, CrossEntropy | BinaryCrossEntropy):
        got = type(inner).__name__
    elif any(getattr(inner, name, None) is not None for name in ("weight", "pos_weight")):
        got = f"{type(inner).__name__} with weights"
    else:
        return
    raise OptionError(
        "Expected a classifier with the loss 'cross_entropy' or 'bce_with_logits' without weights, but got "
        f"{got}. Try loss='cross_entropy'."
    )


def compute_bounded_losses(kind: BoundedLoss, loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in [0, 1] of each example, in float64. Outputs that overflowed count as the largest loss."""
    outputs, targets = outputs.double(), cast_targets(targets)
    loss.check(outputs, targets)
    _check_classes(loss, outputs, targets)
    met, kept = find_hits(loss, outputs, targets)
    if met.numel() != len(outputs) or not bool(kept.all()):
        raise OptionError(
            f"Expected one label per example, but got targets of shape {tuple(targets.shape)}, or some that are "
            "ignored: predictions for one example are not independent. Try data with one label per example."
        )
    if kind == "error":
        # NaN is no prediction, not even of the class of outputs that are not positive.
        defined = outputs.isfinite().reshape(len(outputs), -1).all(1)
        return (~(met.reshape(-1) & defined)).double()
    cap = log(1 / LEAST_PROBABILITY)
    return loss.total(outputs, targets).reshape(-1).nan_to_num(cap, cap, cap).clamp(0.0, cap) / cap


def _check_classes(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Check that targets of real numbers are probabilities of several classes, and not the values of a regression."""
    if not isinstance(getattr(loss, "inner", loss), CrossEntropy) or outputs.dim() < 2:
        return
    if outputs.shape[1] < 2:
        raise LabelError(
            f"Expected at least 2 classes, but got outputs of shape {tuple(outputs.shape)} with cross_entropy. Try "
            "loss='bce_with_logits' for two classes and one output; a regression has no error to bound."
        )
    if targets.is_floating_point() and bool(((targets.sum(1) - 1).abs() > 1e-3).any()):
        raise LabelError(
            "Expected class numbers, or probabilities that sum to 1 for each example, but got real targets that do "
            "not. Try targets.long() for class numbers."
        )
