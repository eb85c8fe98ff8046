"""Ways to a gradient other than that of the loss: SAM and its relatives, one file per method.

A recipe turns one on by the setting of its name. Each has two versions: the optimizer or penalty of
:mod:`saltflat.training` for one network, and one for a batch of networks, whose weights are the rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.studies.recipe import Recipe

GRADIENT_RULES: dict[str, GradientRule] = {}
# Inputs, labels and dropout masks of a step.
StepTensors: TypeAlias = tuple[Tensor, ...]
Objective: TypeAlias = Callable[[nn.Module, StepTensors], Tensor]
# Leaves the gradient in ``.grad``, given the objective, the tensors of the step and the epoch; returns the loss.
OwnGradient: TypeAlias = Callable[[Objective, StepTensors, int], Tensor]


class BatchPasses(Protocol):
    """The passes of a batch of networks on the examples of one step."""

    @property
    def count(self) -> int:
        """The number of examples."""

    @property
    def is_bias(self) -> Tensor:
        """Which weights of a row belong to biases."""

    @property
    def has_batch_norm(self) -> bool:
        """Whether a BatchNorm layer in training mode makes examples of a batch depend on each other."""

    def update_statistics(self, rows: Tensor) -> None:
        """Update the running statistics of layers other than BatchNorm, as a pass over all examples does."""

    def compute_gradient(self, rows: Tensor, *, shifted: bool = False) -> tuple[Tensor, Tensor]:
        """Return the losses and their gradients on all examples; at shifted weights running statistics are kept."""

    def compute_part_gradients(self, rows: Tensor, begin: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the losses and gradients on parts of ``size`` examples from ``begin`` on, each at its own weights.

        Args:
            rows: weights ``(networks, parts, weights)``.
            begin: first example of the first part.
            size: number of examples in each part.
        """


@dataclass(frozen=True)
class GradientRule:
    """A method to compute the gradient of a step.

    Attributes:
        name: the setting that turns it on where it is above 0.
        alone: prepares the method for one network and its optimizer.
        plan: returns the method's factors of an epoch by name, one number for each network, in float64.
        together: returns the losses and gradients of a batch of networks, given its passes, weights, factors
            ``(networks, 1)``, and the recipe of one of them for the settings they share.
        shared: further settings that must be the same for all networks of a batch.
        splits: whether it runs on parts of a batch, in the precision of the weights.
    """

    name: str
    alone: Callable[[nn.Module, Optimizer, Recipe], OwnGradient]
    plan: Callable[[Sequence[Recipe], int], dict[str, Tensor]]
    together: Callable[[BatchPasses, Tensor, Mapping[str, Tensor], Recipe], tuple[Tensor, Tensor]]
    shared: tuple[str, ...] = ()
    splits: bool = False


def register_gradient_rule(rule: GradientRule) -> None:
    """Make a method available to recipes under its name."""
    GRADIENT_RULES[rule.name] = rule


def find_gradient_rule(recipe: Recipe) -> GradientRule | None:
    """Return the method that a recipe turns on; None for the gradient of the loss.

    Example:
        >>> find_gradient_rule(Recipe(sam=0.05)).name, find_gradient_rule(Recipe())
        ('sam', None)
    """
    return next((rule for name, rule in GRADIENT_RULES.items() if getattr(recipe, name) > 0), None)


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
