"""Notes on inputs, outputs and losses that are probably not what the network was trained on."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from saltflat.data import Batch
from saltflat.losses import BinaryCrossEntropy, CrossEntropy, CustomLoss, Loss, NegativeLogLikelihood
from saltflat.problem import Problem, cast_targets

GUESSING = "no better than guessing"
OTHER_SLOPE = (
    "The model's backward pass is not the derivative of its forward pass (a straight-through estimator, or a part that "
    "is detached). Gradients, curvature and certificate are those of the backward pass, as in training; they do not "
    "say how the loss changes with the weights."
)
FEW_OUTPUTS = 32  # so few may lie between 0 and 1 by chance


def find_input_notes(problem: Problem, batch: Batch, mean_loss: float) -> list[str]:
    """Sentences for the reader of a report.

    Args:
        problem: model, loss and data.
        batch: a few of the examples.
        mean_loss: of all the data.
    """
    with torch.no_grad():
        outputs = problem.network(batch).double()
    targets = cast_targets(batch.targets)
    found = [_find_pixel_note(tensor) for tensor in batch.list_tensors() if batch.has_example_axis(tensor)]
    found += [
        _find_probability_note(problem.loss, outputs, targets),
        _find_chance_note(problem.loss, outputs, targets, mean_loss),
        _find_linear_loss_note(problem.loss, outputs, targets),
    ]
    if problem.network.has_other_slope:
        found.append(OTHER_SLOPE)
    return list(dict.fromkeys(note for note in found if note))


def _find_pixel_note(inputs: Tensor) -> str:
    """Images of bytes have values up to 255, whatever type they were converted to."""
    if inputs.dtype == torch.bool or inputs.is_complex() or not inputs.numel():
        return ""
    low, high = float(inputs.min()), float(inputs.max())
    is_image = inputs.dim() >= 4
    if inputs.is_floating_point():
        is_image = is_image or bool((inputs == inputs.round()).all())
        is_scaled = high < 100
    else:
        is_image = is_image or (inputs.dtype == torch.uint8 and inputs.dim() >= 3)
        is_scaled = high <= 1
    if not is_image or is_scaled or low < 0 or high > 255:
        return ""
    return (
        f"The inputs run from {low:g} to {high:g}, like pixels that were not scaled. Unless the network was trained on "
        "them as they are, prepare them as in training (for instance, divide by 255)."
    )


def _find_probability_note(loss: Loss, outputs: Tensor, targets: Tensor) -> str:
    if bool((outputs < 0).any()) or bool((outputs > 1).any()):
        return ""
    if isinstance(loss, CrossEntropy) and not isinstance(loss, NegativeLogLikelihood):
        axis = loss.find_class_axis(outputs, targets)
        if outputs.shape[axis] > 1 and bool(((outputs.sum(axis) - 1).abs() < 1e-4).all()):
            return (
                "The outputs are probabilities already: all lie between 0 and 1, and those of each example sum to 1. "
                "cross_entropy takes a softmax of them again. Measure the network without its last softmax."
            )
    if isinstance(loss, BinaryCrossEntropy) and outputs.numel() >= FEW_OUTPUTS:
        return (
            f"The outputs may be probabilities already: the first {outputs.numel()} all lie between 0 and 1. "
            "bce_with_logits takes a sigmoid of them again. Measure the network without its last sigmoid."
        )
    return ""


def _find_chance_note(loss: Loss, outputs: Tensor, targets: Tensor, mean_loss: float) -> str:
    """Equal probabilities for all classes have this loss whatever the class weights and the label smoothing."""
    if isinstance(loss, CrossEntropy):
        classes = outputs.shape[loss.find_class_axis(outputs, targets)]
    elif isinstance(loss, BinaryCrossEntropy) and loss.pos_weight is None:
        classes = 2
    else:
        return ""
    if not mean_loss > log(classes) * (1 + 1e-6) or classes < 2:
        return ""
    return (
        f"The mean loss is {mean_loss:.4g}, and equal probabilities for all {classes} classes would have "
        f"log {classes} = {log(classes):.4g}: the network is {GUESSING}. Check that trained weights were "
        "loaded, and that inputs and labels are prepared as in training."
    )


def _find_linear_loss_note(loss: Loss, outputs: Tensor, targets: Tensor) -> str:
    if not isinstance(loss, CustomLoss):
        return ""
    free = outputs.detach().requires_grad_()
    direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    with torch.enable_grad():
        slope = loss.compute_slope(free, targets, create_graph=True)
        try:
            bent = _differentiate((slope * direction).sum(), free)
        except RuntimeError:  # torch has no second derivative of it, which measures made of gradients do not need
            return ""
    if (bent is not None and bool(bent.any())) or not bool(slope.any()):
        return ""
    return (
        "The loss function is linear in the outputs around those of the network, so its Gauss-Newton curvature is 0 "
        "whatever the network: measures made of it say nothing here. For log-probabilities, pass "
        "loss=torch.nn.NLLLoss() itself; for absolute values or hinges, use measures of the true Hessian."
    )


def _differentiate(value: Tensor, by: Tensor) -> Tensor | None:
    """The derivative; None where it is zero because nothing depends on it."""
    return torch.autograd.grad(value, by, allow_unused=True)[0] if value.requires_grad else None
