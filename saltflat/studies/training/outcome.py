"""Decide when a training ends, and evaluate the trained network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat.studies.data import Examples
from saltflat.studies.recipe import Recipe
from saltflat.studies.row import Outcome
from saltflat.studies.training.examples import make_training_set


@torch.no_grad()
def evaluate_model(model: nn.Module, inputs: Tensor, labels: Tensor, batch_size: int = 1024) -> tuple[float, float]:
    """Return the mean cross-entropy and the error in eval mode; the model keeps its modes.

    Example:
        >>> evaluate_model(nn.Identity(), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1]))
        (0.6931471..., 0.5)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
        wrong = torch.zeros((), dtype=torch.int64, device=inputs.device)
        for some, answers in zip(inputs.split(batch_size), labels.split(batch_size), strict=True):
            logits = model(some)
            loss += F.cross_entropy(logits, answers, reduction="none").double().sum()
            wrong += (logits.argmax(-1) != answers).sum()
        return float(loss) / len(labels), float(wrong) / len(labels)
    finally:
        for module, training in modes:
            module.training = training


def has_targets(recipe: Recipe) -> bool:
    """Return whether the recipe has a target for the loss or the error."""
    return recipe.target_loss is not None or recipe.target_error is not None


def is_check_due(recipe: Recipe, epochs: int) -> bool:
    """Return whether the targets are checked after this many epochs.

    Example:
        >>> [epochs for epochs in range(1, 9) if is_check_due(Recipe(epochs=8, target_loss=0.1, check_every=3), epochs)]
        [3, 6, 8]
    """
    return has_targets(recipe) and (epochs % recipe.check_every == 0 or epochs >= recipe.epochs)


def has_met_targets(recipe: Recipe, loss: float, error: float) -> bool:
    """Return whether the loss and error on the training examples meet all targets."""
    return (recipe.target_loss is None or loss <= recipe.target_loss) and (
        recipe.target_error is None or error <= recipe.target_error
    )


def decide_status(recipe: Recipe, loss: float, error: float) -> str:
    """Return the status of a network with finite weights at the end of its training."""
    return "done" if has_met_targets(recipe, loss, error) else "missed"


NOTHING = (math.nan, math.nan)


def evaluate_outcome(
    model: nn.Module,
    recipe: Recipe | None,
    examples: Examples,
    initial: Mapping[str, Tensor] | None = None,
    epochs: int = 0,
    curve: Sequence[float] = (),
    *,
    notes: Sequence[str] = (),
) -> Outcome:
    """Evaluate a trained model.

    Args:
        model: model after training; not changed.
        recipe: recipe with the targets and the label noise of the training; None for neither.
        examples: examples on the device of the model, in its precision.
        initial: parameters before training by name, if known.
        epochs: number of epochs of the training.
        curve: mean loss over the steps of each epoch.
        notes: notes for the reader.
    """
    if recipe is None:
        inputs, labels, measured = examples.train_inputs, examples.train_labels, len(examples.train_labels)
    else:
        found = make_training_set(recipe, examples)
        inputs, labels, measured = found.inputs, found.labels, found.measured
    train = evaluate_model(model, inputs[:measured], labels[:measured])
    test = evaluate_model(model, examples.test_inputs, examples.test_labels)
    parameters = dict(model.named_parameters())
    return make_outcome(
        recipe, parameters, initial, train, test, (measured, len(examples.test_labels)), epochs, curve, notes
    )


def make_outcome(
    recipe: Recipe | None,
    parameters: Mapping[str, Tensor],
    initial: Mapping[str, Tensor] | None,
    train: tuple[float, float],
    test: tuple[float, float],
    counts: tuple[int, int],
    epochs: int,
    curve: Sequence[float],
    notes: Sequence[str] = (),
) -> Outcome:
    """Return the outcome for these losses and errors; ``"diverged"`` if any of them is not finite."""
    norm = compute_norm(parameters.values())
    fine = all(map(math.isfinite, (norm, *train, *test, *curve)))
    if not fine:
        status, train, test = "diverged", NOTHING, NOTHING
    else:
        status = "done" if recipe is None else decide_status(recipe, *train)
    distance = None
    if initial is not None:
        distance = compute_norm(value.detach() - initial[name].to(value) for name, value in parameters.items())
    return Outcome(
        status=status,
        epochs=epochs,
        train_loss=train[0],
        train_error=train[1],
        test_loss=test[0],
        test_error=test[1],
        train_examples=counts[0],
        test_examples=counts[1],
        parameters=sum(value.numel() for value in parameters.values()),
        norm=norm,
        distance=distance,
        curve=tuple(curve),
        notes=tuple(notes),
    )


@torch.no_grad()
def compute_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    return math.sqrt(math.fsum(float(each.detach().double().square().sum()) for each in tensors))
