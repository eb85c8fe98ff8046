"""When a training is over, and what to call its end."""

from __future__ import annotations

from saltflat.studies.recipe import Recipe


def has_targets(recipe: Recipe) -> bool:
    return recipe.target_loss is not None or recipe.target_error is not None


def is_check_due(recipe: Recipe, epochs: int) -> bool:
    """Whether the targets are looked at after so many epochs.

    Example:
        >>> [epochs for epochs in range(1, 9) if is_check_due(Recipe(epochs=8, target_loss=0.1, check_every=3), epochs)]
        [3, 6, 8]
    """
    return has_targets(recipe) and (epochs % recipe.check_every == 0 or epochs >= recipe.epochs)


def has_met_targets(recipe: Recipe, loss: float, error: float) -> bool:
    """Whether every target that is given is reached, on the training examples in eval mode."""
    return (recipe.target_loss is None or loss <= recipe.target_loss) and (
        recipe.target_error is None or error <= recipe.target_error
    )


def decide_status(recipe: Recipe, loss: float, error: float) -> str:
    """Of a network with finite weights at the end of its training."""
    return "done" if has_met_targets(recipe, loss, error) else "missed"
