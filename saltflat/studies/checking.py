"""Settings that mean nothing are refused before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Collection

from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.studies import augmentation, labels
from saltflat.studies.initialisation import SCHEMES
from saltflat.studies.optimizers import OPTIMIZERS
from saltflat.studies.precision import DTYPES
from saltflat.studies.recipe import Recipe
from saltflat.studies.schedules import SCHEDULES

NAMES: dict[str, tuple[str, Collection[str]]] = {
    "optimizer": ("optimizer", OPTIMIZERS),
    "schedule": ("schedule", SCHEDULES),
    "init": ("initialisation", ("default", *SCHEMES)),
    "augment": ("augmentation", augmentation.KINDS),
    "label_noise_kind": ("kind of label noise", labels.KINDS),
    "dtype": ("dtype", DTYPES),
}
# From where to where a number may go; the second end is left out where it says so.
NUMBERS = {
    "lr": (0, math.inf),
    "momentum": (0, math.inf),
    "l2": (0, math.inf),
    "weight_decay": (0, math.inf),
    "beta1": (0, 1),
    "beta2": (0, 1),
    "eps": (0, math.inf),
    "decay": (0, math.inf),
    "dropout": (0, 1),
    "init_scale": (-math.inf, math.inf),
    "target_loss": (-math.inf, math.inf),
    "target_error": (-math.inf, math.inf),
}
COUNTS = {"batch": 1, "epochs": 0, "check_every": 1, "crop": 0, "confusion": 0, "train_size": 1}
OPTIONAL = ("target_loss", "target_error", "train_size")


def check_recipe(recipe: Recipe) -> Recipe:
    """The recipe, if each of its settings means something."""
    for field, (kind, known) in NAMES.items():
        if getattr(recipe, field) not in known:
            raise make_unknown_name_error(kind, getattr(recipe, field), known)
    for field, (low, high) in NUMBERS.items():
        value = getattr(recipe, field)
        if value is None and field in OPTIONAL:
            continue
        if not _is_finite_number(value) or not low <= value < high:
            wanted = "a number" if low == -math.inf else f"a number from {low:g} to below {high:g}"
            raise _make_setting_error(field, value, wanted)
    for field, least in COUNTS.items():
        value = getattr(recipe, field)
        if value is None and field in OPTIONAL:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _make_setting_error(field, value, f"a whole number of at least {least}")
    if not _is_finite_number(recipe.label_noise) or not 0 <= recipe.label_noise <= 1:
        raise _make_setting_error("label_noise", recipe.label_noise, "a share from 0 to 1")
    if not isinstance(recipe.seed, int) or isinstance(recipe.seed, bool):
        raise _make_setting_error("seed", recipe.seed, "a whole number")
    if not all(_is_finite_number(share) for share in recipe.milestones):
        raise _make_setting_error("milestones", recipe.milestones, "shares of the epochs, such as (0.5, 0.75)")
    return recipe


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _make_setting_error(field: str, value: object, wanted: str) -> OptionError:
    return OptionError(f"Got {field}={value!r}. Want {wanted}. Do: set another {field}.")
