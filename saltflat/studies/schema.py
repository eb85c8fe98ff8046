"""The schema of recipes: every setting and its allowed values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import init

from saltflat.errors import OptionError, SaltflatError, UnknownNameError, make_unknown_name_error
from saltflat.studies.gradient_rules import GRADIENT_RULES
from saltflat.studies.optimizers import OPTIMIZERS
from saltflat.studies.recipe import Recipe, Value
from saltflat.studies.schedules import SCHEDULES
from saltflat.studies.training.examples import AUGMENTATION_KINDS, NOISE_KINDS, SUBSET_KINDS

LARGEST_SEED = 2**63 - 1
# The precision of the weights: tf32 and bf16 differ from float32 only inside of a pass.
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "float64": torch.float64}
INITIALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier_normal": init.xavier_normal_,
    "xavier_uniform": init.xavier_uniform_,
    "kaiming_normal": lambda weight: init.kaiming_normal_(weight, nonlinearity="relu"),
    "kaiming_uniform": lambda weight: init.kaiming_uniform_(weight, nonlinearity="relu"),
    "normal": init.normal_,
    "uniform": lambda weight: init.uniform_(weight, -1.0, 1.0),
}
# A value as JSON, YAML or Python has it.
Given: TypeAlias = "Value | list[Value]"


@dataclass(frozen=True)
class ValueRule:
    """The values that a setting may have.

    Attributes:
        want: the values in words.
        fits: whether a value of the right type is in the range.
        kind: ``float``, ``int``, ``bool`` or ``list``.
        optional: whether None is allowed.
    """

    want: str
    fits: Callable[[Any], bool]
    kind: type = float
    optional: bool = False

    def find_problem(self, name: str, value: Given, exact: bool = False) -> SaltflatError | None:
        """Return the error for a value that is not allowed; None for one that is.

        Args:
            name: of the setting.
            value: to check.
            exact: whether 64.0 is no whole number, since nothing converts it.
        """
        if value is None and self.optional:
            return None
        inexact = exact and self.kind is int and not isinstance(value, int)
        if inexact or not self._is_right_type(value) or not self.fits(value):
            return OptionError(f"Expected {self.want}, but got {name}={value!r}. Try another {name}.")
        return None

    def convert(self, value: Given) -> Given:
        """Return the value in its own type: 64.0 examples are 64, a learning rate of 1 is 1.0."""
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [float(each) for each in value]  # type: ignore[arg-type]
        converted: Value = self.kind(value)
        return converted

    def _is_right_type(self, value: Given) -> bool:
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is list:
            return isinstance(value, list | tuple) and all(_is_number(each) for each in value)
        return _is_number(value) and (self.kind is float or value == int(value))  # type: ignore[arg-type]


def _is_number(value: Given) -> bool:
    """Return whether a value is a finite number that fits in a float."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and (math.isfinite(value) if isinstance(value, float) else abs(value) <= sys.float_info.max)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ChoiceRule:
    """A setting that is one of a few names.

    Attributes:
        what: the kind of setting in words.
        names: the names.
        synonyms: the name that is meant by another that users may try.
    """

    what: str
    names: Collection[str]
    synonyms: Mapping[str, str] = field(default_factory=dict)

    def find_problem(self, name: str, value: Given, exact: bool = False) -> SaltflatError | None:
        """Return the error for a name that is not known; None for one that is."""
        if isinstance(value, str) and value in self.names:
            return None
        if isinstance(value, str) and value in self.synonyms:
            listed, meant = ", ".join(self.names), self.synonyms[value]
            return UnknownNameError(f"Expected one of {listed}, but got the {self.what} {value!r}. Try {meant!r}.")
        return make_unknown_name_error(self.what, value, self.names)

    def convert(self, value: Given) -> Given:
        """Return the name as it is."""
        return value


_POSITIVE = ValueRule("a number above 0", lambda value: value > 0)
_NOT_NEGATIVE = ValueRule("a number from 0", lambda value: value >= 0)
_BELOW_ONE = ValueRule("a number from 0 to below 1", lambda value: 0 <= value < 1)
_SHARE = ValueRule("a number from 0 to 1", lambda value: 0 <= value <= 1)
_COUNT = ValueRule("a whole number from 1", lambda value: value >= 1, int)
_COUNT_FROM_ZERO = ValueRule("a whole number from 0", lambda value: value >= 0, int)

ALLOWED: dict[str, ValueRule | ChoiceRule] = {
    "seed": ValueRule("a whole number from 0 to 2^63 - 1", lambda value: 0 <= value <= LARGEST_SEED, int),
    "optimizer": ChoiceRule("optimizer", OPTIMIZERS),
    "lr": _POSITIVE,
    "momentum": _BELOW_ONE,
    "nesterov": ValueRule("true or false", lambda value: True, bool),
    "weight_decay": _NOT_NEGATIVE,
    "decoupled_weight_decay": _NOT_NEGATIVE,
    "beta1": _BELOW_ONE,
    "beta2": _BELOW_ONE,
    "eps": _POSITIVE,
    "sam": _NOT_NEGATIVE,
    "asam": _NOT_NEGATIVE,
    "asam_eta": _NOT_NEGATIVE,
    "gradient_norm": _NOT_NEGATIVE,
    "gradient_norm_balance": _SHARE,
    "fisher_penalty": _NOT_NEGATIVE,
    "fisher_parts": _COUNT,
    "fisher_alpha": _POSITIVE,
    "fisher_clip": ValueRule("a number above 0, or none", lambda value: value > 0, optional=True),
    "fisher_start_epoch": _COUNT_FROM_ZERO,
    "label_smoothing": _BELOW_ONE,
    "schedule": ChoiceRule("schedule", SCHEDULES),
    "decay": _NOT_NEGATIVE,
    "milestones": ValueRule(
        "a list of fractions of the epochs, from 0 to 1", lambda value: all(0 <= each <= 1 for each in value), list
    ),
    "patience": _COUNT_FROM_ZERO,
    "warmup": _NOT_NEGATIVE,
    "batch_size": _COUNT,
    "epochs": _COUNT_FROM_ZERO,
    "target_loss": ValueRule("a number above 0, or none", lambda value: value > 0, optional=True),
    "target_error": ValueRule("a number from 0 to below 1, or none", lambda value: 0 <= value < 1, optional=True),
    "check_every": _COUNT,
    "dropout": _BELOW_ONE,
    "init": ChoiceRule("initialization", ("default", *INITIALIZERS)),
    "init_scale": _POSITIVE,
    "train_size": ValueRule("a whole number from 1, or none", lambda value: value >= 1, int, optional=True),
    "train_subset": ChoiceRule("subset", SUBSET_KINDS),
    "label_noise": _SHARE,
    "label_noise_kind": ChoiceRule("kind of label noise", NOISE_KINDS),
    "confusion": _COUNT_FROM_ZERO,
    "augment": ChoiceRule("augmentation", AUGMENTATION_KINDS),
    "crop": _COUNT_FROM_ZERO,
    "dtype": ChoiceRule("dtype", DTYPES, {"bfloat16": "bf16", "float": "float32", "double": "float64"}),
}


def check_recipe(recipe: Recipe) -> None:
    """Check that every setting of a recipe has an allowed value.

    Example:
        >>> check_recipe(Recipe(momentum=2))
        Traceback (most recent call last):
        saltflat.errors.OptionError: Expected a number from 0 to below 1, but got momentum=2. Try another momentum.
    """
    for name, rule in ALLOWED.items():
        problem = rule.find_problem(name, getattr(recipe, name), exact=True)
        if problem is not None:
            raise problem
    conflict = find_conflict(recipe)
    if conflict is not None:
        raise OptionError(conflict)


def find_conflict(recipe: Recipe) -> str | None:
    """Return what is wrong with settings that exclude each other; None if nothing is."""
    if recipe.schedule == "plateau" and recipe.decay >= 1:
        return (
            f"Expected a decay below 1 with schedule='plateau', which lowers the learning rate, but got "
            f"decay={recipe.decay!r}. Try decay=0.1."
        )
    if 0 < recipe.epochs < recipe.warmup:
        return (
            f"Expected a warmup of at most the number of epochs, but got warmup={recipe.warmup!r} with "
            f"epochs={recipe.epochs!r}. Try a shorter warmup."
        )
    asked = [name for name in GRADIENT_RULES if getattr(recipe, name) > 0]
    if len(asked) < 2:
        return None
    got = ", ".join(f"{name}={getattr(recipe, name)!r}" for name in asked)
    return (
        f"Expected at most one of {', '.join(GRADIENT_RULES)} above 0, but got {got} in one run. Try a study for each, "
        "or an axis on which they vary together, such as 'sam, asam': [[0, 0], [0.05, 0], [0, 0.5]]."
    )
