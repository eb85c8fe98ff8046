"""The schema of recipes: every setting and its allowed values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from saltflat.errors import make_unknown_name_error
from saltflat.studies.optimizers import OPTIMIZERS, SCHEDULES
from saltflat.studies.training import examples
from saltflat.studies.training.build import DTYPES, SCHEMES

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class ValueRule:
    """What a setting may be.

    Attributes:
        want: in words.
        fits: whether a value of the right kind is in the range.
        kind: ``float``, ``int``, ``bool`` or ``list``.
        optional: whether None is a value too.
    """

    want: str
    fits: Callable[[Any], bool]
    kind: type = float
    optional: bool = False

    def find_problem(self, name: str, value: Any) -> str | None:
        """What is wrong with a value; None if nothing is."""
        if value is None and self.optional:
            return None
        if not self._is_right_type(value) or not self.fits(value):
            return f"Expected {self.want}, but got {name}={value!r}. Correct it."
        return None

    def convert(self, value: Any) -> Any:
        """The value in its own type: 64.0 examples are 64, a learning rate of 1 is 1.0."""
        if value is None:
            return None
        return [float(each) for each in value] if self.kind is list else self.kind(value)

    def _is_right_type(self, value: Any) -> bool:
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is list:
            return isinstance(value, list | tuple) and all(_is_number(each) for each in value)
        return _is_number(value) and (self.kind is float or value == int(value))


def _is_number(value: Any) -> bool:
    """Whether a value is a number, and one that a float can hold."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and (isinstance(value, float) or abs(value) <= sys.float_info.max)


@dataclass(frozen=True)
class ChoiceRule:
    """A setting that is one of a few names."""

    what: str
    names: Collection[str]

    def find_problem(self, name: str, value: Any) -> str | None:
        return (
            None
            if isinstance(value, str) and value in self.names
            else str(make_unknown_name_error(self.what, value, self.names))
        )

    def convert(self, value: Any) -> Any:
        return value


_POSITIVE = ValueRule("a number above 0", lambda value: value > 0)
_NOT_NEGATIVE = ValueRule("a number from 0", lambda value: value >= 0)
_BELOW_ONE = ValueRule("a number from 0 to below 1", lambda value: 0 <= value < 1)
_COUNT = ValueRule("a whole number from 1", lambda value: value >= 1, int)
_COUNT_FROM_ZERO = ValueRule("a whole number from 0", lambda value: value >= 0, int)

ALLOWED: dict[str, ValueRule | ChoiceRule] = {
    "seed": ValueRule("a whole number from 0 to 2^63 - 1", lambda value: 0 <= value <= LARGEST_SEED, int),
    "optimizer": ChoiceRule("optimizer", OPTIMIZERS),
    "lr": _POSITIVE,
    "momentum": _BELOW_ONE,
    "nesterov": ValueRule("true or false", lambda value: True, bool),
    "l2": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "beta1": _BELOW_ONE,
    "beta2": _BELOW_ONE,
    "eps": _POSITIVE,
    "schedule": ChoiceRule("schedule", SCHEDULES),
    "decay": _NOT_NEGATIVE,
    "milestones": ValueRule(
        "a list of shares of the epochs, from 0 to 1", lambda value: all(0 <= each <= 1 for each in value), list
    ),
    "batch": _COUNT,
    "epochs": _COUNT_FROM_ZERO,
    "target_loss": ValueRule("a number above 0, or none", lambda value: value > 0, optional=True),
    "target_error": ValueRule("a share from 0 to below 1, or none", lambda value: 0 <= value < 1, optional=True),
    "check_every": _COUNT,
    "dropout": _BELOW_ONE,
    "init": ChoiceRule("initialisation", ("default", *SCHEMES)),
    "init_scale": _POSITIVE,
    "train_size": ValueRule("a whole number from 1, or none", lambda value: value >= 1, int, optional=True),
    "label_noise": ValueRule("a share from 0 to 1", lambda value: 0 <= value <= 1),
    "label_noise_kind": ChoiceRule("kind of label noise", examples.NOISE_KINDS),
    "confusion": _COUNT_FROM_ZERO,
    "augment": ChoiceRule("augmentation", examples.AUGMENTATION_KINDS),
    "crop": _COUNT_FROM_ZERO,
    "dtype": ChoiceRule("dtype", DTYPES),
}
