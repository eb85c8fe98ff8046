"""Labels as a model itself uses them for its own loss: for the next token, in another shape, as decoder inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.engine.data import SPANS, Batch
from saltflat.engine.losses import CrossEntropy, Loss
from saltflat.engine.output_curvature import Curvature

if TYPE_CHECKING:
    from saltflat.engine.problem import Problem

MAKE_DECODER_INPUTS = "prepare_decoder_input_ids_from_labels"
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")


class ModelLoss(Loss):
    """The model's own loss, until it is known which one that is; see :func:`saltflat.engine.model_loss.fit_targets`."""

    def _refuse(self) -> NoReturn:
        raise RuntimeError("the model's own loss is not known yet")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        self._refuse()

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._refuse()

    def share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._refuse()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._refuse()

    def curvature(self, outputs: Tensor, targets: Tensor) -> Curvature:
        self._refuse()


@dataclass(frozen=True)
class TargetRule:
    """What a model does with labels before it compares its outputs with them.

    Attributes:
        is_shifted: outputs are compared with the labels of the next position.
        shape: of one example's outputs, to which labels with as many numbers are reshaped.
        make_decoder_inputs: makes a decoder's inputs from labels.
    """

    is_shifted: bool = False
    shape: tuple[int, ...] | None = None
    make_decoder_inputs: Callable[..., Tensor] | None = None

    def apply(self, batch: Batch) -> Batch:
        """Return the batch with labels and inputs as the model uses them."""
        kwargs, targets = batch.kwargs, batch.targets
        if self.make_decoder_inputs is not None and not any(name in kwargs for name in DECODER_INPUTS):
            kwargs = {**kwargs, DECODER_INPUTS[0]: self.make_decoder_inputs(labels=targets)}
        if self.is_shifted:
            targets = shift_labels(targets)
        if self.shape is not None and targets[0].numel() == _multiply(self.shape):
            targets = targets.reshape(len(targets), *self.shape)
        return replace(batch, kwargs=kwargs, targets=targets)

    def describe(self, model: nn.Module) -> str:
        """Return a note about what is done with labels that are given, empty if nothing."""
        if not self.is_shifted:
            return ""
        return f"Each output is compared with the label of the next position, as {type(model).__name__} itself does."


def _multiply(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def shift_labels(labels: Tensor) -> Tensor:
    """Return the labels of the next positions; the last one is ignored."""
    return F.pad(labels[:, 1:], (0, 1), value=CrossEntropy().ignore_index)


def takes_labels(model: nn.Module) -> bool:
    """Return whether forward may accept labels, going by its signature alone."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # some callables have none
        return False
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return anything or "labels" in parameters or all(name in parameters for name in SPANS)


def find_decoder_rule(problem: Problem) -> TargetRule:
    """Return the rule of an encoder-decoder, which makes the decoder's inputs from labels; else one without effect."""
    made: Any = getattr(problem.model, MAKE_DECODER_INPUTS, None)
    return TargetRule(make_decoder_inputs=made if callable(made) else None)
