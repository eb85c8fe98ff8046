"""The loss of outputs whose scale has been taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from saltflat.amounts import is_choice
from saltflat.errors import LabelError, OptionError, make_unknown_name_error
from saltflat.losses import CrossEntropy, CustomLoss, Loss, format_shape

LOGITS = ("none", "std", "l2")


def normalize_logits(loss: Loss, logits: str) -> Loss:
    """The loss of outputs whose scale has been taken away, example by example.

    Args:
        loss: of the outputs as they are.
        logits: ``"none"``; ``"std"``: centred over the outputs and divided by their standard deviation; ``"l2"``:
            centred and divided by their length.
    """
    if not is_choice(logits, LOGITS):
        raise make_unknown_name_error("normalisation of the logits", logits, LOGITS)
    if logits == "none":
        return loss
    if not isinstance(loss, CrossEntropy) or loss.weight is not None:
        raise OptionError(
            f"Got logits={logits!r} with {type(loss).__name__}. Want cross_entropy without class weights: only of its "
            "outputs does the scale not matter to predictions. Do: leave logits out."
        )
    return NormalizedLogitsLoss(loss, logits)


@dataclass(frozen=True)
class NormalizedLogitsLoss(CustomLoss):
    """Cross-entropy of logits brought to unit deviation or length, with its own (indefinite) curvature."""

    function: Callable[[Tensor, Tensor], Tensor] = field(init=False)
    inner: CrossEntropy = field(kw_only=True)
    logits: str = field(kw_only=True)

    def __init__(self, inner: CrossEntropy, logits: str) -> None:
        def compute_normalized_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            centred = outputs - outputs.mean(1, keepdim=True)
            size = centred.square().mean(1, keepdim=True) if logits == "std" else centred.square().sum(1, keepdim=True)
            return inner.total(centred / size.sqrt(), targets).sum()

        object.__setattr__(self, "function", compute_normalized_loss)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "logits", logits)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner.check(outputs, targets)
        if outputs.dim() != 2:
            raise LabelError(
                f"Got outputs of shape {format_shape(outputs)}. Want (N, classes) to normalise. Do: leave logits out."
            )

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner.share(outputs, targets)
