"""How a training ended, put together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from saltflat.studies.evaluating import evaluate_model
from saltflat.studies.examples import Examples
from saltflat.studies.labels import make_training_set
from saltflat.studies.recipe import Recipe
from saltflat.studies.stopping import decide_status
from saltflat.studies.trained import Outcome

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
    """Of a model that was trained by anyone.

    Args:
        model: after training; left as it is.
        recipe: what it was trained by: its targets, and the labels it was trained on. None for the examples as they
            are and no targets.
        examples: on the device of the model, in its precision.
        initial: parameters before training by name, if known.
        epochs: that training took.
        curve: mean loss of each epoch, as training saw it.
        notes: for the reader.
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
    """The outcome, once losses and errors are known; whatever is not finite makes it ``"diverged"``."""
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
    """Euclidean, of all together."""
    return math.sqrt(math.fsum(float(each.detach().double().square().sum()) for each in tensors))
