"""The objective: the mean loss of a batch, as a function of the model and the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn import functional as F

from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.data import unpack_batch
from saltflat.engine.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Loss,
    LossLike,
    NegativeLogLikelihood,
    SquaredError,
    parse_loss,
)
from saltflat.engine.model_output import extract_logits
from saltflat.engine.model_targets import ModelLoss
from saltflat.errors import OptionError
from saltflat.training.parts import TrainingBatch

Objective: TypeAlias = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> the mean loss of the batch


def make_objective(loss: LossLike) -> Objective:
    """Return a function that computes the mean loss of a batch with torch's own functions.

    Args:
        loss: a name, a loss module of torch or a function, as everywhere in this package. A function receives the
            outputs and targets of a whole batch and returns the mean loss, as in any training loop.

    Example:
        >>> import torch
        >>> objective = make_objective("mse")
        >>> objective(nn.Identity(), (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
        tensor(5.)
    """
    function = _make_loss_function(parse_loss(loss))

    def compute_objective(model: nn.Module, batch: TrainingBatch) -> Tensor:
        args, kwargs, targets = unpack_batch(batch)
        return function(extract_logits(model(*args, **kwargs)), targets)

    return compute_objective


def is_mean_over_examples(loss: LossLike, batch: TrainingBatch) -> bool:
    """Return whether the loss of a batch is the mean over its examples: not with class weights or ignored labels."""
    known = parse_loss(loss)
    if not isinstance(known, CrossEntropy):
        return not isinstance(known, CustomLoss)  # a function of the user's own
    _, _, targets = unpack_batch(batch)
    if targets.is_floating_point():
        return True
    return known.weight is None and not bool((targets == known.ignore_index).any())


def compute_mean_loss(objective: Objective, model: nn.Module, batch: TrainingBatch) -> Tensor:
    """Return the value of the objective, checked to be a single number."""
    value = objective(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise OptionError(
            f"Expected the mean loss of the batch, a single number, but got {got} from the objective. Try averaging "
            "over the examples, for instance with reduction='mean'."
        )
    if value.layout != torch.strided or not value.is_floating_point():
        raise OptionError(
            f"Expected a floating-point number from the objective, but got a tensor of {value.dtype} with the layout "
            f"{value.layout}. Try to_dense() and float()."
        )
    return value.reshape(())


def _make_loss_function(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(loss, ModelLoss):
        raise OptionError(
            "Expected a loss of outputs and targets, but got loss='model'. Try objective=lambda model, batch: "
            "model(**batch).loss."
        )
    if isinstance(loss, CrossEntropy):
        return lambda outputs, targets: _compute_cross_entropy(loss, outputs, targets)
    if isinstance(loss, CustomLoss):
        return loss.function
    if isinstance(loss, SquaredError):

        def compute_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
            loss.check(outputs, targets)
            return F.mse_loss(outputs, targets.to(outputs))

        return compute_squared_error
    if isinstance(loss, BinaryCrossEntropy):

        def compute_binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
            SquaredError().check(outputs, targets)  # shapes only: reading values would synchronize the device
            weight = None if loss.pos_weight is None else loss.pos_weight.to(outputs)
            return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), pos_weight=weight)

        return compute_binary_cross_entropy
    return lambda outputs, targets: loss.total(outputs, targets).sum() / loss.share(outputs, targets).sum()


def _compute_cross_entropy(loss: CrossEntropy, outputs: Tensor, targets: Tensor) -> Tensor:
    axis = loss.find_class_axis(outputs, targets)
    if targets.device.type == "cpu" and peek_interpreter_stack() is None:
        # This reads the labels, which would synchronize a GPU and fail inside torch.func transforms.
        CrossEntropy.check(loss, outputs, targets)
    outputs = outputs.movedim(axis, -1).flatten(0, -2)
    weight = None if loss.weight is None else loss.weight.to(outputs)
    if targets.is_floating_point():
        targets = targets.to(outputs).movedim(axis, -1).flatten(0, -2)
        return F.cross_entropy(outputs, targets, weight, label_smoothing=loss.label_smoothing)
    targets = targets.long().flatten()
    if not isinstance(loss, NegativeLogLikelihood):
        total = F.cross_entropy(
            outputs,
            targets,
            weight,
            ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
            reduction="sum",
        )
    else:  # outputs are not checked: reading values would synchronize the device
        total = F.nll_loss(outputs, targets, weight, ignore_index=loss.ignore_index, reduction="sum")
    kept = targets != loss.ignore_index
    share = kept.sum() if weight is None else (weight[targets.where(kept, 0)] * kept).sum()
    # A few examples may have no label at all. Their mean would be 0 / 0; the loss is defined as 0 instead.
    return total / share.where(share != 0, 1).to(total)
