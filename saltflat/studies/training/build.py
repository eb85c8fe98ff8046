"""Build a network as its recipe says: architecture, initialization, precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.conv import _ConvNd

from saltflat.engine.session import set_precision, snapshot_precision
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.studies.networks import find_network
from saltflat.studies.optimizers import OPTIMIZERS, SCHEDULES
from saltflat.studies.recipe import Recipe
from saltflat.studies.training import examples
from saltflat.studies.training.examples import derive_seed

# What a recipe's dtype means for tensors; tf32 differs from float32 only inside of products.
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@contextmanager
def use_matmul_precision(dtype: str) -> Iterator[None]:
    """All digits in matrix products and convolutions on a GPU; or, with tf32, three, which is quicker."""
    back = snapshot_precision()
    try:
        set_precision("high" if dtype == "tf32" else "highest")
        yield
    finally:
        back()


SCHEMES: dict[str, Callable[[Tensor], object]] = {
    "xavier_normal": init.xavier_normal_,
    "xavier_uniform": init.xavier_uniform_,
    "kaiming_normal": lambda weight: init.kaiming_normal_(weight, nonlinearity="relu"),
    "kaiming_uniform": lambda weight: init.kaiming_uniform_(weight, nonlinearity="relu"),
    "normal": init.normal_,
    "uniform": lambda weight: init.uniform_(weight, -1.0, 1.0),
}


@torch.no_grad()
def initialise_weights(model: nn.Module, recipe: Recipe) -> None:
    """Draw the weights of all linear layers and convolutions as the recipe says, and set their biases to zero.

    With ``"default"`` they stay as the network made them. Either way they are multiplied by ``init_scale``.
    """
    if recipe.init != "default" and recipe.init not in SCHEMES:
        raise make_unknown_name_error("initialisation", recipe.init, ["default", *SCHEMES])
    for module in model.modules():
        if not isinstance(module, nn.Linear | _ConvNd):
            continue
        if recipe.init != "default":
            SCHEMES[recipe.init](module.weight)
            if module.bias is not None:
                module.bias.zero_()
        if recipe.init_scale != 1:
            module.weight.mul_(recipe.init_scale)


NAMES: dict[str, tuple[str, Collection[str]]] = {
    "optimizer": ("optimizer", OPTIMIZERS),
    "schedule": ("schedule", SCHEDULES),
    "init": ("initialisation", ("default", *SCHEMES)),
    "augment": ("augmentation", examples.AUGMENTATION_KINDS),
    "label_noise_kind": ("kind of label noise", examples.NOISE_KINDS),
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
    return OptionError(f"Expected {wanted}, but got {field}={value!r}. Try setting another {field}.")


def build_network(recipe: Recipe, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network in eval mode on the CPU, with weights that depend on the recipe's seed alone.

    They are drawn in float32, so that a float64 training starts from the same numbers.

    Args:
        recipe: of which the network, its architecture, the seed, the initialisation and the dtype matter here.
        shape: of one input.
        classes: how many outputs.
    """
    check_recipe(recipe)
    kept = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        # Of the CPU alone: torch.manual_seed would move the generators of GPUs, too.
        torch.default_generator.manual_seed(derive_seed(recipe.seed, "weights"))
        try:
            model = find_network(recipe.network).build_model(shape, classes, recipe.architecture)
            initialise_weights(model, recipe)
        finally:
            torch.set_default_dtype(kept)
    return model.to(DTYPES[recipe.dtype]).eval()
