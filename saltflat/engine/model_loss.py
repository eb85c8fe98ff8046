"""Compare the loss with the one a model computes itself when it is given labels, as those of Hugging Face do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.data import SPANS, Batch
from saltflat.engine.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError, format_shape
from saltflat.engine.model_targets import ModelLoss, TargetRule, find_decoder_rule, shift_labels
from saltflat.engine.problem import Problem, can_accept_labels, cast_targets
from saltflat.errors import LabelError, ModelError, format_error_line

TOLERANCE = 1e-5  # relative; the model computes its own loss in float32


def fit_targets(problem: Problem) -> Problem:
    """Return the problem with the model's own loss, and its labels as the model itself uses them.

    The loss is the one that equals the model's for the first examples whose labels are not all ignored. With
    cross-entropy, the default, nothing changes but the positions of labels, and only if the model's loss is
    cross-entropy with the labels of the next position.
    """
    wanted = isinstance(problem.loss, ModelLoss)
    problem = replace(problem, rule=find_decoder_rule(problem))
    for batch in problem.iterate_pairs():
        if not can_accept_labels(problem.model, batch):
            if wanted:
                raise _refuse_model(problem, "whose forward does not accept labels by name")
            return problem
        with torch.no_grad(), problem.network.use_parameters(problem.network.constants):
            own = compute_model_loss(problem.model, batch.args, batch.kwargs, batch.targets)
        if own is None:
            if wanted:
                raise _refuse_model(problem, _explain_missing_loss(problem, batch))
            return problem
        if isfinite(own):
            return _choose_loss(problem, batch, own)
    if wanted:
        raise _refuse_model(problem, "whose own loss is NaN or infinite for all of the data: no label counts, perhaps")
    return problem


def _choose_loss(problem: Problem, batch: Batch, own: float) -> Problem:
    """Return the problem with the loss and the rule by which a batch has the model's own loss."""
    wanted = isinstance(problem.loss, ModelLoss)
    with torch.no_grad():
        outputs = problem.network(batch).double()
    shape = tuple(outputs.shape[1:])
    rules: list[tuple[Loss, TargetRule]] = [
        (CrossEntropy(), problem.rule),
        (CrossEntropy(), replace(problem.rule, is_shifted=True)),
        (SquaredError(), replace(problem.rule, shape=shape)),
        (BinaryCrossEntropy(), replace(problem.rule, shape=shape)),
    ]
    for loss, rule in rules if wanted else rules[:2]:
        if rule.is_shifted and (_shift_labels(batch, loss) is None or _is_shifted(batch, CrossEntropy())):
            continue
        targets = cast_targets(rule.apply(batch).targets)
        try:
            loss.check(outputs, targets)
        except LabelError:
            continue
        if _is_close(own, _compute_mean_loss(loss, outputs, targets)):
            return replace(problem, loss=loss, rule=rule)
    if wanted and (shifted := _shift_labels(batch, CrossEntropy())) is not None and _is_shifted(batch, CrossEntropy()):
        raise _refuse_model(
            problem,
            "whose labels are shifted already, so that it shifts them twice"
            if _is_close(own, _compute_mean_loss(CrossEntropy(), outputs, shifted))
            else f"whose loss of {own:.6g} is none of those known",
        )
    if wanted:
        raise _refuse_model(problem, f"whose loss of {own:.6g} is none of those known")
    return problem


def _refuse_model(problem: Problem, why: str) -> ModelError:
    return ModelError(
        f"Expected a model that computes cross-entropy, squared error or binary cross-entropy from labels, but got "
        f"{type(problem.model).__name__} with loss='model', {why}. Try passing a loss, or a function "
        "loss(outputs, targets)."
    )


def check_model_loss(problem: Problem, batches: Sequence[Batch]) -> None:
    """Check that the loss is the one the model itself computes for the same labels.

    A loss that the user passed as a function is not compared. The first of the (small) batches whose labels are not all
    ignored decides.
    """
    if isinstance(problem.loss, CustomLoss) or not can_accept_labels(problem.model, batches[0]):
        return
    for batch in batches:
        with torch.no_grad(), problem.network.use_parameters(problem.network.constants):
            own = compute_model_loss(problem.model, batch.args, batch.kwargs, batch.targets)
        if own is None:
            return
        if isfinite(own):
            _check_same_loss(problem, batch, own)
            return


def _check_same_loss(problem: Problem, batch: Batch, own: float) -> None:
    with torch.no_grad():
        outputs, targets = problem.network(batch).double(), cast_targets(batch.targets)
        ours = _compute_mean_loss(problem.loss, outputs, targets)
        # Smoothing and class weights are the user's choice. What matters is which output belongs to which label.
        plain = problem.loss
        if isinstance(plain, CrossEntropy):
            plain = replace(plain, label_smoothing=0.0, weight=None)
        if _is_close(own, ours) or _is_close(own, _compute_mean_loss(plain, outputs, targets)):
            return
        next_ones = _shift_labels(batch, plain)
        if next_ones is None or not _is_close(own, _compute_mean_loss(plain, outputs, next_ones)):
            advice = _format_loss_advice(own, outputs, targets)
        elif isinstance(plain, CrossEntropy) and _is_shifted(batch, plain):
            return
        else:
            advice = (
                "Try loss='model', or shifting the labels, since this model compares each output with the next label: "
                "labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)."
            )
    raise ModelError(
        f"Expected the loss the model is trained on, but got {type(problem.loss).__name__}, which is {ours:.6g} for "
        f"{batch.examples} examples, while {type(problem.model).__name__} itself computes {own:.6g} for these labels. "
        f"{advice}"
    )


def compute_model_loss(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Tensor
) -> float | None:
    """Return the loss of a model that is called with labels, or None if it returns none."""
    try:
        outputs = _run_with_labels(model, args, kwargs, labels)
    except Exception:  # labels it does not accept
        return None
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple):
        found = outputs[0]
    return float(found) if isinstance(found, Tensor) and found.dim() == 0 else None


def _run_with_labels(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Tensor) -> Any:
    """Return what a model returns when it is called with labels, or raise what it raises."""
    config: Any = getattr(model, "config", None)
    kept = getattr(config, "problem_type", None)  # transformers sets it in the first pass with labels
    # Copies, because a model may write to its inputs.
    args, kwargs, labels = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, dict(kwargs), labels))
    named = {"labels": labels}
    parameters = inspect.signature(model.forward).parameters
    if "labels" not in parameters and all(name in parameters for name in SPANS):
        named = dict(zip(SPANS, labels.unbind(1), strict=False))
    try:
        return model(*args, **{**kwargs, **named})
    finally:
        if hasattr(config, "problem_type"):
            config.problem_type = kept


def _explain_missing_loss(problem: Problem, batch: Batch) -> str:
    """Return why the model has no loss for the labels of a batch."""
    try:
        with torch.no_grad(), problem.network.use_parameters(problem.network.constants):
            _run_with_labels(problem.model, batch.args, batch.kwargs, batch.targets)
    except Exception as error:
        return f"which raises {format_error_line(error)} for these inputs and labels"
    return "which returns no loss for the labels of the data"


def _compute_mean_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> float:
    return float(loss.total(outputs, targets).sum() / loss.share(outputs, targets).sum())


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))


def _shift_labels(batch: Batch, loss: Loss) -> Tensor | None:
    if not isinstance(loss, CrossEntropy) or batch.targets.dim() != 2 or batch.targets.is_floating_point():
        return None
    return shift_labels(batch.targets)


def _is_shifted(batch: Batch, loss: CrossEntropy) -> bool:
    """Return whether the labels are already those of the next tokens.

    The tokens decide if they are among the inputs; otherwise, whether all labels end in ignored ones.
    """
    labels = batch.targets
    kept = labels != loss.ignore_index
    for tokens in batch.list_tensors():
        if tokens.shape == labels.shape and not tokens.is_floating_point():
            if bool((tokens == labels)[kept].all()):
                return False
            if bool((tokens[:, 1:] == labels[:, :-1])[kept[:, :-1]].all()):
                return True
    return not bool(kept[:, -1].any())


def _format_loss_advice(own: float, outputs: Tensor, targets: Tensor) -> str:
    for name, loss in {"mse": SquaredError(), "bce_with_logits": BinaryCrossEntropy()}.items():
        if targets.numel() == outputs.numel() and targets.dtype != torch.bool:
            values = targets.reshape(outputs.shape).to(outputs)
            if _is_close(own, _compute_mean_loss(loss, outputs, values)):
                shape = "" if values.shape == targets.shape else f", with labels of shape {format_shape(outputs)}"
                return f"Try loss={name!r}{shape}."
    return "Try passing the model's own loss as a function loss(outputs, targets)."
